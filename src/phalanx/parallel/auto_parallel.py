"""`AutoParallel`: a function with options of its own, as MindSpore's class of this name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import InvalidKeyError, InvalidTypeError, InvalidValueError
from phalanx.parallel.context import options_in_force
from phalanx.parallel.option_checks import check_dataset_strategy, check_type
from phalanx.parallel.options import SCHEDULERS, ParallelOptions, changed
from phalanx.parallel.parallelizing import Parallelized, parallelize
from phalanx.parallel.pipelines.cells import PipelineCell
from phalanx.runtime.formatting import shown

__all__ = ["AutoParallel", "ParallelMode"]

_MODES = ("semi_auto", "sharding_propagation", "recursive_programming", "dynamic_programming")


class ParallelMode:
    """The names of the modes.

    >>> ParallelMode.AUTO_PARALLEL
    'auto_parallel'
    """

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"
    MODE_LIST = (STAND_ALONE, DATA_PARALLEL, HYBRID_PARALLEL, SEMI_AUTO_PARALLEL, AUTO_PARALLEL)


class AutoParallel:
    """A loss or a step that is laid out over devices, with options of its own.

    Its options are in force while it is traced, in this thread or task; those of
    `set_auto_parallel_context` are neither read nor changed. It is compiled by its first call.

    Args:
        network: a loss, or a step that calls `value_and_grad`; see `parallelize`. A `PipelineCell` runs
            in stages, and takes its devices itself.
        parallel_mode: ``semi_auto``, or how a plan is searched: ``dynamic_programming``, which is
            exact, ``recursive_programming`` or ``sharding_propagation``.
        parameters: the numbers of the arguments that are parameters, or other state of a step.
        **where: what `parallelize` takes besides: devices, mesh, parameter_plan, plan, hardware,
            memory, time_limit, donate_argnums.

    Examples:
        >>> import jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum((x @ w) ** 2)
        >>> net = AutoParallel(loss, parallel_mode="dynamic_programming", devices=["CPU:0", "CPU:1"])
        >>> float(net(jnp.ones((4, 2)), jnp.ones((8, 4))))
        256.0
        >>> net.program.plan.mode
        'exact'
    """

    def __init__(
        self,
        network: Callable[..., Any],
        parallel_mode: str = "semi_auto",
        *,
        parameters: int | Sequence[int] = 0,
        **where: Any,
    ) -> None:
        if not callable(network):
            raise InvalidTypeError(f"AutoParallel needs a function. Received: {shown(network)}")
        if parallel_mode not in _MODES:
            raise InvalidValueError(
                f"the argument 'parallel_mode' must be one of {list(_MODES)}, "
                f"but got the value : {parallel_mode} ."
            )
        self._network, self._parameters, self._where = network, parameters, where
        self._program: Parallelized | None = None
        self._options = changed(
            ParallelOptions(),
            {
                "parallel_mode": "semi_auto_parallel"
                if parallel_mode == "semi_auto"
                else "auto_parallel",
                "enable_alltoall": True,
                "auto_parallel_new_interface": True,
            },
        )
        if parallel_mode != "semi_auto":
            self._set(search_mode=parallel_mode)

    def __call__(self, *args: Any) -> Any:
        """What the function returns, computed on all devices."""
        with options_in_force(self._options):
            return self._runner(args)(*args)

    def value_and_grad(self, *args: Any) -> Any:
        """The value of a loss and its gradients; see `Parallelized.value_and_grad`."""
        with options_in_force(self._options):
            return self._runner(args).value_and_grad(*args)

    def compile(self, *example_args: Any) -> Parallelized:
        """Compile for arguments of these shapes; returns the program, which can create parameters."""
        with options_in_force(self._options):
            return self._compiled(example_args)

    @property
    def program(self) -> Parallelized:
        """The program, with its plan and its shardings."""
        if self._program is None:
            raise InvalidValueError("There is no program before the first call, or `compile`.")
        return self._program

    @property
    def options(self) -> ParallelOptions:
        """The options."""
        return self._options

    def _runner(self, args: tuple[Any, ...]) -> Parallelized | PipelineCell:
        return self._network if isinstance(self._network, PipelineCell) else self._compiled(args)

    def _compiled(self, args: tuple[Any, ...]) -> Parallelized:
        if self._program is None:
            self._program = parallelize(self._network, args, parameters=self._parameters, **self._where)
        return self._program

    def _set(self, **options: Any) -> None:
        self._options = changed(self._options, options)
        self._program = None

    def __repr__(self) -> str:
        return f"AutoParallel({getattr(self._network, '__name__', self._network)})"

    # -- options -------------------------------------------------------------------------------------

    def pipeline(
        self,
        stages: int = 1,
        output_broadcast: bool = False,
        interleave: bool = False,
        scheduler: str = "1f1b",
    ) -> None:
        """Cut the network into stages; for more than one it must be a `PipelineCell`."""
        what = "For 'AutoParallel.pipeline', the argument"
        for name, value, kind in (
            ("stages", stages, int),
            ("output_broadcast", output_broadcast, bool),
            ("interleave", interleave, bool),
            ("scheduler", scheduler, str),
        ):
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise InvalidTypeError(
                    f"{what} '{name}' must be {kind.__name__} type, but got the type : {type(value)}."
                )
        if stages < 1:
            raise InvalidValueError(
                f"{what} 'stages' must be larger than zero, but got value: {stages}."
            )
        if scheduler not in SCHEDULERS:
            listed = "/".join(repr(name) for name in SCHEDULERS)
            raise InvalidValueError(
                f"{what} 'scheduler' must be {listed} , but got the value : {scheduler}."
            )
        self._set(
            pipeline_stages=stages,
            pipeline_result_broadcast=output_broadcast,
            pipeline_config={"pipeline_interleave": interleave, "pipeline_scheduler": scheduler},
        )

    def get_pipeline_stages(self) -> int:
        """The number of stages."""
        return self._options.pipeline_stages

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> None:
        """Keep parameters and the state of the optimizer in parts, as a parallel optimizer does."""
        if type(shard_size) is not int or (shard_size < 1 and shard_size != -1):
            raise InvalidValueError(
                f"shard_size must be a positive integer or -1, but got {shard_size}."
            )
        if type(threshold) is not int or threshold < 0:
            raise InvalidValueError(f"threshold must be a positive integer or 0, but got {threshold}.")
        config: dict[str, Any] = {
            "parallel_optimizer_threshold": threshold,
            "optimizer_level": optimizer_level,
        }
        if shard_size != -1:
            config["optimizer_weight_shard_size"] = shard_size
        self._set(enable_parallel_optimizer=True, parallel_optimizer_config=config)

    def dataset_strategy(self, config: Any) -> None:
        """How batches are cut: "data_parallel", "full_batch", tuples of parts, or layouts."""
        if config is None:
            raise InvalidValueError("dataset_strategy is none in config!")
        where = ("AutoParallel.dataset_strategy", "config", "tuple or Layout")
        self._set(dataset_strategy=check_dataset_strategy(config, *where))

    def comm_fusion(self, config: dict[str, Any]) -> None:
        """How collectives are packed."""
        check_type(str(config), config, dict)
        self._set(comm_fusion=config)

    def load_param_strategy_file(self, file_path: str) -> None:
        """Keep the layouts of a file that `save_param_strategy_file` wrote."""
        self._set(strategy_ckpt_load_file=_checked_path(file_path))

    def save_param_strategy_file(self, file_path: str) -> None:
        """Write the layouts to a file when they are known."""
        self._set(strategy_ckpt_save_file=_checked_path(file_path))

    def disable_strategy_file_only_for_trainable_params(self) -> None:
        """Write the layouts of inputs too."""
        self._set(strategy_ckpt_config={"only_trainable_params": False})

    def load_operator_strategy_file(self, file_path: str) -> None:
        """Keep the plan of a file that `save_operator_strategy_file` wrote."""
        self._set(strategy_ckpt_load_file=_operator_file(file_path))

    def save_operator_strategy_file(self, file_path: str) -> None:
        """Write the plan, with the layouts of all operators, to a file when it is known."""
        self._set(strategy_ckpt_save_file=_operator_file(file_path))

    def set_group_ckpt_save_file(self, file_path: str) -> None:
        """Write which devices hold the same part of each parameter to a file."""
        self._set(group_ckpt_save_file=_checked_path(file_path))

    def enable_fp32_communication(self) -> None:
        """Sum 16-bit numbers of several devices in 32 bits."""
        self._set(force_fp32_communication=True)

    def enable_gradients_mean(self) -> None:
        """Average gradients in place of summing them, where each device has its own."""
        self._set(gradients_mean=True)

    def disable_gradient_fp32_sync(self) -> None:
        """Sum gradients in their own dtype."""
        self._set(gradient_fp32_sync=False)

    def disable_loss_repeated_mean(self) -> None:
        """Do not divide by the number of devices that compute the loss repeatedly."""
        self._set(loss_repeated_mean=False)

    def print_local_norm(self) -> None:
        """Print the norm of each local gradient."""
        self._set(dump_local_norm=True)

    def dump_local_norm(self, file_path: str) -> None:
        """Write the norm of each local gradient to a file."""
        self._set(dump_local_norm=True, dump_local_norm_path=_checked_path(file_path))

    def enable_device_local_norm(self) -> None:
        """Print the norm of all local gradients of each device."""
        self._set(dump_device_local_norm=True)

    def transformer_opt(self, file_path: str) -> None:
        """A hint without effect: the file tunes how Ascend devices communicate, which XLA decides here.

        Args:
            file_path: of MindSpore's configuration, which is not read.
        """
        _checked_path(file_path)

    def no_init_parameters_in_compile(self) -> None:
        """Let `Parallelized.create` make parameters first, and place them then."""
        self._set(init_param_in_compile=False)


def _checked_path(path: Any) -> str:
    if not isinstance(path, str):
        raise InvalidTypeError(
            f"the argument 'file_path' must be str, but got the type : {type(path)} ."
        )
    return path


def _operator_file(path: Any) -> str:
    checked = Path(_checked_path(path))
    if not checked.is_absolute():
        raise InvalidKeyError("the argument 'file_path' must be an absolute path.")
    if checked.suffix != ".json":
        raise InvalidKeyError("File type must be .json")
    return str(checked)
