"""The options of MindSpore's auto-parallel context: their defaults, and what each may be.

`ParallelOptions` is a frozen value. `changed` checks all changes before it makes any of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from phalanx.errors import InvalidKeyError, InvalidTypeError, InvalidValueError
from phalanx.parallel.option_checks import (
    check_comm_fusion,
    check_dataset_strategy,
    check_fusion_indices,
    check_known_keys,
    check_type,
)

__all__ = [
    "AUTO_MODES",
    "MODES",
    "READABLE",
    "SCHEDULERS",
    "SEARCH_MODES",
    "SETTABLE",
    "ParallelOptions",
    "changed",
    "read",
]

AUTO_MODES = ("semi_auto_parallel", "auto_parallel")
MODES = ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")
SEARCH_MODES = ("recursive_programming", "dynamic_programming", "sharding_propagation")
SCHEDULERS = ("1f1b", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v")
LEVELS = ("level1", "level2", "level3")
COMMUNICATION_MODES = ("all_group_parallel", "same_server_group_parallel", "no_group_parallel")

_AUTO = {"mode": "auto", "config": None}


def _default_fusion() -> dict[str, Any]:
    return {
        "openstate": True,
        "allreduce": dict(_AUTO),
        "allgather": dict(_AUTO),
        "reducescatter": dict(_AUTO),
    }


@dataclass(frozen=True)
class ParallelOptions:
    """All options of a context. The names are MindSpore's; None means that an option was not set."""

    device_num: int | None = None
    global_rank: int = 0
    gradients_mean: bool = False
    gradient_fp32_sync: bool = True
    force_fp32_communication: bool = False
    loss_repeated_mean: bool = True
    parallel_mode: str = "stand_alone"
    search_mode: str = "recursive_programming"
    sharding_propagation: bool = False
    parameter_broadcast: bool = False
    strategy_ckpt_load_file: str = ""
    strategy_ckpt_save_file: str = ""
    only_trainable_params: bool = True
    group_ckpt_save_file: str = ""
    full_batch: bool = False
    full_batch_is_set: bool = False
    dataset_strategy: Any = "data_parallel"
    enable_parallel_optimizer: bool = False
    gradient_accumulation_shard: bool | None = None
    parallel_optimizer_threshold: int = 64
    optimizer_level: str | None = None
    optimizer_weight_shard_size: int = -1
    optimizer_weight_shard_aggregated_save: bool = False
    enable_alltoall: bool = False
    all_reduce_fusion_config: tuple[int, ...] = ()
    comm_fusion: Mapping[str, Any] = field(default_factory=_default_fusion)
    communi_parallel_mode: str = "all_group_parallel"
    pipeline_stages: int = 1
    pipeline_segments: int = 1
    pipeline_result_broadcast: bool = False
    pipeline_interleave: bool = False
    pipeline_scheduler: str = "1f1b"
    auto_pipeline: bool = False
    grad_accumulation_step: int = 1
    dump_local_norm: bool = False
    dump_local_norm_path: str = ""
    dump_device_local_norm: bool = False
    auto_parallel_new_interface: bool = False
    init_param_in_compile: bool = True


Changes = dict[str, Any]
Check = Callable[[Any, ParallelOptions], Changes]


# -- setting ------------------------------------------------------------------------------------


def changed(options: ParallelOptions, changes: Mapping[str, Any]) -> ParallelOptions:
    """The options after some changes, all of which are checked before any counts.

    >>> changed(ParallelOptions(), {"pipeline_stages": 2}).pipeline_stages
    2
    """
    for name in changes:
        if name not in _CHECKS:
            raise InvalidValueError(f"Set context keyword {name} is not recognized!")
    for name, value in changes.items():
        if name in _TYPES:
            check_type(name, value, _TYPES[name])
    for name, value in changes.items():
        options = replace(options, **_CHECKS[name](value, options))
    return options


def _plain(name: str) -> Check:
    return lambda value, options: {name: value}


def _device_num(value: Any, options: ParallelOptions) -> Changes:
    if value < 1:
        raise InvalidValueError(
            "The context configuration parameter 'device_num' must be a positive integer, "
            f"but got the value of device_num : {value}."
        )
    return {"device_num": int(value)}


def _global_rank(value: Any, options: ParallelOptions) -> Changes:
    if not 0 <= value <= 4095:
        raise InvalidValueError(
            "The context configuration parameter 'global_rank' must be in [0, 4095], "
            f"but got the value of global_rank : {value}."
        )
    return {"global_rank": int(value)}


def _parallel_mode(value: Any, options: ParallelOptions) -> Changes:
    if value not in MODES:
        raise InvalidValueError(
            "The context configuration parameter 'parallel_mode' only support 'stand_alone', "
            "'data_parallel', 'hybrid_parallel', 'semi_auto_parallel' and 'auto_parallel', "
            f"but got the value : {value}."
        )
    return {"parallel_mode": value}


def _search_mode(called: str) -> Check:
    def check(value: Any, options: ParallelOptions) -> Changes:
        if value not in SEARCH_MODES:
            raise InvalidValueError(
                f"The context configuration parameter '{called}' only support 'recursive_programming', "
                f"'dynamic_programming' and 'sharding_propagation', but got the value: {value}."
            )
        return {"search_mode": value}

    return check


def _strategy_files(value: Any, options: ParallelOptions) -> Changes:
    kinds = {"load_file": str, "save_file": str, "only_trainable_params": bool}
    check_known_keys(value, list(kinds))
    for name, given in value.items():
        if not isinstance(given, kinds[name]):
            raise InvalidTypeError(
                "For 'set_auto_parallel_context().set_strategy_ckpt_config', the argument "
                f"'{name}' must be {kinds[name].__name__}, but got the type : {type(given)} ."
            )
    names = {
        "load_file": "strategy_ckpt_load_file",
        "save_file": "strategy_ckpt_save_file",
        "only_trainable_params": "only_trainable_params",
    }
    return {names[name]: given for name, given in value.items()}


def _full_batch(value: Any, options: ParallelOptions) -> Changes:
    changes: Changes = {"full_batch": value, "full_batch_is_set": True}
    if isinstance(options.dataset_strategy, str):
        changes["dataset_strategy"] = "full_batch" if value else "data_parallel"
    return changes


def _dataset_strategy(value: Any, options: ParallelOptions) -> Changes:
    checked = check_dataset_strategy(value)
    is_word = isinstance(checked, str)
    return {"dataset_strategy": checked} | ({"full_batch": checked == "full_batch"} if is_word else {})


def _parallel_optimizer(value: Any, options: ParallelOptions) -> Changes:
    check_known_keys(
        value,
        [
            "gradient_accumulation_shard",
            "parallel_optimizer_threshold",
            "optimizer_weight_shard_size",
            "optimizer_level",
        ],
    )
    changes: Changes = {}
    if "gradient_accumulation_shard" in value:
        shard = _checked_bool("gradient_accumulation_shard", value["gradient_accumulation_shard"])
        changes["gradient_accumulation_shard"] = shard
    if "parallel_optimizer_threshold" in value:
        threshold = value["parallel_optimizer_threshold"]
        _check_number("parallel_optimizer_threshold", threshold, 0)
        changes["parallel_optimizer_threshold"] = threshold
    if "optimizer_weight_shard_size" in value:
        size = value["optimizer_weight_shard_size"]
        if size != -1:
            _check_number("optimizer_weight_shard_size", size, 1)
        changes |= _shard_size(size, options)
    if "optimizer_level" in value:
        changes |= _optimizer_level(value["optimizer_level"], value, options)
    return changes


def _optimizer_level(level: Any, given: Mapping[str, Any], options: ParallelOptions) -> Changes:
    if level not in LEVELS:
        raise InvalidValueError(f"Optimizer level should in {list(LEVELS)}, but got {level}")
    if level != "level2":
        if "gradient_accumulation_shard" in given:
            raise InvalidValueError(
                f"The optimizer_level is set as {level}, "
                "thus cannot set grad_accumulation_shard as True."
            )
        if options.gradient_accumulation_shard:
            raise InvalidValueError(
                "The grad_accumulation shard is set, thus cannot set optimizer_level != 'level2'"
            )
        return {"optimizer_level": level}
    return {"optimizer_level": level, "gradient_accumulation_shard": True}


def _shard_size(value: Any, options: ParallelOptions) -> Changes:
    # MindSpore ignores a group of one, which is no group.
    return {"optimizer_weight_shard_size": value if value > 1 else -1}


def _fusion_indices(value: Any, options: ParallelOptions) -> Changes:
    return {"all_reduce_fusion_config": check_fusion_indices(value)}


def _comm_fusion(value: Any, options: ParallelOptions) -> Changes:
    result = check_comm_fusion(value, options.comm_fusion)
    changes: Changes = {"comm_fusion": result}
    if result["allreduce"]["mode"] == "index" and "allreduce" in value:
        changes["all_reduce_fusion_config"] = tuple(result["allreduce"]["config"])
    return changes


def _communication_mode(value: Any, options: ParallelOptions) -> Changes:
    if value not in COMMUNICATION_MODES:
        raise InvalidValueError(
            "For 'set_auto_parallel_context().set_communi_parallel_mode', the argument "
            "'communi_parallel_mode' only support 'ALL_GROUP_PARALLEL', 'SAME_SEVER_GROUP_PARALLEL' "
            f"and 'NO_GROUP_PARALLEL', but got the value : {value}."
        )
    return {"communi_parallel_mode": value}


def _count(name: str, noun: str) -> Check:
    def check(value: Any, options: ParallelOptions) -> Changes:
        what = f"For 'set_auto_parallel_context', the argument '{name}'"
        if isinstance(value, bool):
            raise InvalidTypeError(f"{what} must be int, but got the type : {type(value)}.")
        if value < 1:
            raise InvalidValueError(
                f"{what} should be greater or equal 1, but got the value of {noun} : {value}."
            )
        return {name: value}

    return check


def _pipeline_config(value: Any, options: ParallelOptions) -> Changes:
    names = ("pipeline_interleave", "pipeline_scheduler")
    check_known_keys(value, names)
    for name in names:
        if name not in value:
            raise InvalidKeyError(name)
    interleave = _checked_bool(names[0], value[names[0]])
    scheduler = value[names[1]]
    if scheduler not in SCHEDULERS:
        listed = [*SCHEDULERS, "seqsmartvpp"]  # as MindSpore lists them
        raise InvalidValueError(
            f"The 'parameter' must be str and must be in '{listed}', but got '{scheduler}'."
        )
    if not interleave and scheduler != "1f1b":
        raise InvalidTypeError(
            f"When pipeline_interleave is False, '{scheduler}' is not supported, "
            "only '1f1b' is allowed."
        )
    return {"pipeline_interleave": interleave, "pipeline_scheduler": scheduler}


def _auto_pipeline(value: Any, options: ParallelOptions) -> Changes:
    if not isinstance(value, bool):
        raise InvalidTypeError(
            "For 'set_auto_parallel_context', the argument 'auto_pipeline' must be bool, "
            f"but got the type : {type(value)}."
        )
    return {"auto_pipeline": value}


def _accumulation(value: Any, options: ParallelOptions) -> Changes:
    _check_number("grad_accumulation_step", value, 1)
    if value > 1:
        raise InvalidValueError(
            "The interface is deprecated. To use gradient accumulation, please use "
            "GradAccumulationCell in mindspore.nn.wrap.cell_wrapper."
        )
    return {"grad_accumulation_step": value}


def _truth(name: str) -> Check:
    def check(value: Any, options: ParallelOptions) -> Changes:
        check_type(name, value, int)
        return {name: bool(value)}

    return check


def _checked_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidTypeError(
            f"For '{name}', the '{name}' must be a bool, but got {type(value).__name__}."
        )
    return value


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(
            f"For '{name}', the input value must be int, but got '{type(value).__name__}'"
        )
    if value < least:
        bound = f"> {least - 1}" if least else ">= 0"
        raise InvalidValueError(
            f"For '{name}', the input value must be int and must {bound}, "
            f"but got '{value}' with type 'int'."
        )


_TYPES: dict[str, type] = {
    "device_num": int,
    "global_rank": int,
    "gradients_mean": bool,
    "gradient_fp32_sync": bool,
    "force_fp32_communication": bool,
    "loss_repeated_mean": bool,
    "parallel_mode": str,
    "search_mode": str,
    "auto_parallel_search_mode": str,
    "sharding_propagation": bool,
    "parameter_broadcast": bool,
    "strategy_ckpt_load_file": str,
    "strategy_ckpt_save_file": str,
    "strategy_ckpt_config": dict,
    "group_ckpt_save_file": str,
    "full_batch": bool,
    "enable_parallel_optimizer": bool,
    "parallel_optimizer_config": dict,
    "optimizer_weight_shard_size": int,
    "optimizer_weight_shard_aggregated_save": bool,
    "enable_alltoall": bool,
    "all_reduce_fusion_config": list,
    "comm_fusion": dict,
    "communi_parallel_mode": str,
    "pipeline_stages": int,
    "pipeline_segments": int,
    "pipeline_result_broadcast": bool,
    "pipeline_config": dict,
    "grad_accumulation_step": int,
    "dump_local_norm_path": str,
    "auto_parallel_new_interface": bool,
    "init_param_in_compile": bool,
}
"""Types that are checked before anything else."""

_CHECKS: dict[str, Check] = {
    **{name: _plain(name) for name, kind in _TYPES.items() if kind in (bool, str)},
    "device_num": _device_num,
    "global_rank": _global_rank,
    "parallel_mode": _parallel_mode,
    "search_mode": _search_mode("auto_parallel_search_mode"),
    "auto_parallel_search_mode": _search_mode("search_mode"),
    "strategy_ckpt_config": _strategy_files,
    "full_batch": _full_batch,
    "dataset_strategy": _dataset_strategy,
    "parallel_optimizer_config": _parallel_optimizer,
    "optimizer_weight_shard_size": _shard_size,
    "all_reduce_fusion_config": _fusion_indices,
    "comm_fusion": _comm_fusion,
    "communi_parallel_mode": _communication_mode,
    "pipeline_stages": _count("pipeline_stages", "stages"),
    "pipeline_segments": _count("pipeline_segments", "segments"),
    "pipeline_config": _pipeline_config,
    "auto_pipeline": _auto_pipeline,
    "grad_accumulation_step": _accumulation,
    "dump_local_norm": _truth("dump_local_norm"),
    "dump_device_local_norm": _truth("dump_device_local_norm"),
}

SETTABLE = tuple(sorted(_CHECKS))
"""What can be set."""


# -- reading ------------------------------------------------------------------------------------


def _strategy_files_of(options: ParallelOptions) -> dict[str, Any]:
    return {
        "load_file": options.strategy_ckpt_load_file,
        "save_file": options.strategy_ckpt_save_file,
        "only_trainable_params": options.only_trainable_params,
    }


def _parallel_optimizer_of(options: ParallelOptions) -> dict[str, Any]:
    return {
        "gradient_accumulation_shard": bool(options.gradient_accumulation_shard),
        "parallel_optimizer_threshold": options.parallel_optimizer_threshold,
        "optimizer_weight_shard_size": options.optimizer_weight_shard_size,
        "optimizer_level": options.optimizer_level or "level1",
    }


def _pipeline_config_of(options: ParallelOptions) -> dict[str, Any]:
    return {
        "pipeline_interleave": options.pipeline_interleave,
        "pipeline_scheduler": options.pipeline_scheduler,
    }


def _dataset_strategy_of(options: ParallelOptions) -> Any:
    value = options.dataset_strategy
    if isinstance(value, str):
        return value
    return [list(x) if isinstance(x, tuple) else x.to_dict() for x in value]


_READERS: dict[str, Callable[[ParallelOptions], Any]] = {
    "device_num": lambda options: options.device_num or 1,
    "auto_parallel_search_mode": lambda options: options.search_mode,
    "strategy_ckpt_config": _strategy_files_of,
    "parallel_optimizer_config": _parallel_optimizer_of,
    "pipeline_config": _pipeline_config_of,
    "dataset_strategy": _dataset_strategy_of,
    "all_reduce_fusion_config": lambda options: list(options.all_reduce_fusion_config),
    "comm_fusion": lambda options: copy.deepcopy(dict(options.comm_fusion)),
    "gradient_accumulation_shard": lambda options: bool(options.gradient_accumulation_shard),
    "optimizer_level": lambda options: options.optimizer_level or "level1",
}

READABLE = tuple(sorted({*(f.name for f in fields(ParallelOptions)), *_READERS}))
"""What can be read."""


def read(options: ParallelOptions, key: Any) -> Any:
    """The value of an option, in the form in which MindSpore gives it.

    >>> read(ParallelOptions(), "pipeline_config")
    {'pipeline_interleave': False, 'pipeline_scheduler': '1f1b'}
    """
    if not isinstance(key, str) or key not in READABLE:
        raise InvalidValueError(f"Get context keyword {key} is not recognized!")
    reader = _READERS.get(key)
    return getattr(options, key) if reader is None else reader(options)
