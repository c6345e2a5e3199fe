"""Which options go together. Checked when a program is about to use them, all at once."""

from __future__ import annotations

from phalanx.errors import InvalidOptionsError
from phalanx.parallel.options import AUTO_MODES, ParallelOptions

__all__ = ["check_together", "conflicts"]

_MOST_RECURSIVE = 1024


def conflicts(options: ParallelOptions, devices: int) -> list[str]:
    """What is wrong with a combination of options on so many devices; [] if nothing is.

    >>> conflicts(ParallelOptions(parallel_mode="data_parallel", device_num=8, pipeline_stages=3), 8)
    ['device_num=8 cannot be divided by pipeline_stages=3']
    """
    return [
        *_device_conflicts(options, devices),
        *_mode_conflicts(options),
        *_search_conflicts(options, devices),
    ]


def check_together(options: ParallelOptions, devices: int) -> None:
    """Refuse options that do not go together, and name all that is wrong with them."""
    found = conflicts(options, devices)
    if found:
        raise InvalidOptionsError(
            f"These options do not go together: {'; '.join(found)}. Change them by "
            "px.set_auto_parallel_context, or start again with px.reset_auto_parallel_context(). "
            f"Received: parallel_mode={options.parallel_mode!r} on {devices} devices"
        )


def _device_conflicts(options: ParallelOptions, devices: int) -> list[str]:
    found = []
    count = options.device_num or devices
    if count > devices:
        found.append(f"device_num={count}, and there are {devices} devices")
    if options.parallel_mode == "stand_alone" and options.device_num not in (None, 1):
        found.append(f"parallel_mode='stand_alone' is for one device, and device_num={count}")
    if count % options.pipeline_stages:
        found.append(
            f"device_num={count} cannot be divided by pipeline_stages={options.pipeline_stages}"
        )
    if options.global_rank >= max(count, 1) and options.global_rank:
        found.append(f"global_rank={options.global_rank} is not below device_num={count}")
    size = options.optimizer_weight_shard_size
    if options.enable_parallel_optimizer and size > count:
        found.append(f"optimizer_weight_shard_size={size} is more than device_num={count}")
    return found


def _mode_conflicts(options: ParallelOptions) -> list[str]:
    found = []
    mode = options.parallel_mode
    is_cut = not isinstance(options.dataset_strategy, str) or options.dataset_strategy == "full_batch"
    if mode not in AUTO_MODES and (options.full_batch or is_cut):
        found.append(
            "full_batch could only be used under semi_auto_parallel or auto_parallel, and so could "
            "layouts in dataset_strategy"
        )
    if options.parameter_broadcast and mode not in ("data_parallel", "hybrid_parallel"):
        found.append(
            "stand_alone, semi_auto_parallel and auto_parallel do not support parameter broadcast"
        )
    if options.enable_parallel_optimizer and mode in ("stand_alone", "hybrid_parallel"):
        found.append(
            f"parallel optimizer is not supported in {mode}; set parallel_mode to 'data_parallel', "
            "'semi_auto_parallel' or 'auto_parallel'"
        )
    if options.gradient_accumulation_shard and options.optimizer_level not in (None, "level2"):
        found.append(
            f"gradient_accumulation_shard needs optimizer_level='level2', and it is "
            f"{options.optimizer_level!r}"
        )
    if options.strategy_ckpt_load_file and mode not in AUTO_MODES:
        found.append(
            "strategy_ckpt_load_file could only be used under semi_auto_parallel or auto_parallel"
        )
    if not options.pipeline_interleave and options.pipeline_scheduler != "1f1b":
        found.append(
            f"pipeline_scheduler={options.pipeline_scheduler!r} needs pipeline_interleave=True"
        )
    return found


def _search_conflicts(options: ParallelOptions, devices: int) -> list[str]:
    if options.parallel_mode != "auto_parallel":
        return []
    found = []
    count = options.device_num or devices
    mode = "sharding_propagation" if options.sharding_propagation else options.search_mode
    if options.pipeline_stages > 1 and mode == "dynamic_programming":
        found.append(
            "pipeline_stages needs search_mode='recursive_programming' or 'sharding_propagation'"
        )
    if options.auto_pipeline and mode != "recursive_programming":
        found.append("auto_pipeline needs search_mode='recursive_programming'")
    if mode == "recursive_programming" and count > _MOST_RECURSIVE:
        found.append(f"search_mode='recursive_programming' is for up to {_MOST_RECURSIVE} devices")
    return found
