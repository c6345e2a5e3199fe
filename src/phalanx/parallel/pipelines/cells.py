"""MindSpore's cells for micro batches: `PipelineCell`, `MicroBatchInterleaved`, `GradAccumulation`.

A network is a function of parameters and a batch that returns a loss, or a dictionary of layers in the
order of the model, of which the last one returns the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.errors import InvalidKeyError, InvalidOptionsError, InvalidTypeError, InvalidValueError
from phalanx.parallel.combinations import check_together
from phalanx.parallel.context import current_options
from phalanx.parallel.options import AUTO_MODES, ParallelOptions
from phalanx.parallel.pipelines.cut_search import search_pipeline
from phalanx.parallel.pipelines.cutting import CutFunction, cut_function
from phalanx.parallel.pipelines.micro_batches import sizes
from phalanx.parallel.pipelines.named_schedules import schedule
from phalanx.parallel.pipelines.pipelined import Pipelined
from phalanx.parallel.pipelines.pipelining import pipeline
from phalanx.parallel.pipelines.stages import Stage
from phalanx.parallel.plan import Plan
from phalanx.parallel.wide_sums import is_narrow
from phalanx.runtime.devices import DeviceLike, default_devices, resolve_devices

__all__ = [
    "GradAccumulation",
    "MicroBatchInterleaved",
    "Pipeline",
    "PipelineCell",
    "PipelineGradReducer",
]

Network = Callable[..., Any] | Mapping[str, Callable[..., Any] | Stage]


def _check_count(cell: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(
            f"For '{cell}', the argument '{name}' must be integer, but got the type : {type(value)}."
        )
    if value <= 0:
        raise InvalidValueError(
            f"For '{cell}', the argument '{name}' must be large than 0, but got {value}."
        )


def _check_network(cell: str, network: Any, layers: bool = False) -> None:
    is_layers = layers and isinstance(network, Mapping) and network
    parts = network.values() if is_layers else ()
    if not callable(network) and not (parts and all(callable(_function(x)) for x in parts)):
        raise InvalidTypeError(
            f"For '{cell}', the argument 'network' must cell type, but got the type : {type(network)}."
        )


def _function(layer: Any) -> Any:
    return layer.function if isinstance(layer, Stage) else layer


class PipelineCell:
    """A network in the stages that the context asks for, and its micro batches.

    The options of `set_auto_parallel_context`, or of the `AutoParallel` that it is given to, say how
    many stages there are and which schedule they follow. It is cut at the first call: by
    `stage_config`, by the ``pipeline_stage`` of layers, or automatically, where that is fastest.

    Args:
        network: a loss, or a dictionary of layers, the last of which returns the loss.
        micro_size: into how many micro batches a batch is cut.
        stage_config: the stages of layers by name. Layers that are not named belong to the stage of
            the layer before.
        segment_config: the chunks of layers by name, with ``pipeline_segments``.
        slices: into how many sequences are cut, for the schedules ``seqpipe``, ``seqvpp`` and
            ``seqsmartvpp``. Layers that look at earlier positions are `Stage(…, carries=True)`.
        devices: to use; by default all accelerators, or all CPU devices where there is none.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> layer = lambda w, x: jnp.tanh(x @ w)
        >>> net = {"a": layer, "b": layer, "loss": lambda w, x, y: jnp.mean((x - y) ** 2)}
        >>> cell = px.parallel.PipelineCell(net, 2, {"a": 0, "b": 1}, devices=["CPU:0", "CPU:1"])
        >>> px.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=2)
        >>> params = {"a": jnp.eye(2), "b": jnp.eye(2), "loss": ()}
        >>> round(float(cell(params, jnp.ones((4, 2)), jnp.zeros((4, 2)))), 4)
        0.4122
        >>> px.reset_auto_parallel_context()
    """

    def __init__(
        self,
        network: Network,
        micro_size: int,
        stage_config: Mapping[str, int] | None = None,
        segment_config: Mapping[str, int] | None = None,
        *,
        slices: int = 1,
        devices: Sequence[DeviceLike] | None = None,
    ) -> None:
        name = type(self).__name__
        _check_network(name, network, layers=True)
        _check_count(name, "micro_size", micro_size)
        _check_count(name, "slices", slices)
        self._slices = slices
        for what, config in (("stage_config", stage_config), ("segment_config", segment_config)):
            known = list(network) if isinstance(network, Mapping) else []
            if config is not None and any(key not in known for key in config):
                missing = {k: v for k, v in config.items() if k not in known}
                raise InvalidKeyError(
                    f"For '{name}', the argument '{what}' : {missing} is not found in 'network' : "
                    f"{known}"
                )
        self._network, self._micro_size, self._devices = network, micro_size, devices
        self._stage_config, self._segment_config = stage_config, segment_config
        self._built: dict[Any, _Built] = {}

    def __call__(self, params: Any, *batch: Any) -> Any:
        """The loss of a batch."""
        built = self.compile(params, *batch)
        return built.pipe(built.split(params), *batch)

    def value_and_grad(self, params: Any, *batch: Any) -> tuple[Any, Any]:
        """The loss of a batch and its gradients, as a nest like the parameters."""
        built = self.compile(params, *batch)
        value, gradients = built.pipe.value_and_grad(built.split(params), *batch)
        return value, built.joined(gradients)

    def predict(self, params: Any, *batch: Any) -> Any:
        """What the last layer returns for a batch, taken as no loss.

        With ``pipeline_result_broadcast`` it is a list with a copy on the devices of each stage.
        """
        built = self.compile(params, *batch, is_loss=False)
        broadcast = current_options().pipeline_result_broadcast
        return built.pipe.predict(built.split(params), *batch, broadcast=broadcast)

    def place(self, params: Any, *batch: Any) -> Any:
        """Parameters on the devices of their stages, in the form in which they are given."""
        built = self.compile(params, *batch)
        return built.joined(built.pipe.place(built.split(params)))

    @property
    def pipelined(self) -> Pipelined:
        """The stages of the last call."""
        if not self._built:
            raise InvalidValueError("There are no stages before the first call.")
        return list(self._built.values())[-1].pipe

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call, if the stages were searched."""
        return list(self._built.values())[-1].plan if self._built else None

    def compile(self, params: Any, *batch: Any, is_loss: bool = True) -> _Built:
        """The stages for a batch of this shape, by the options that are in force."""
        options = current_options()
        found = default_devices() if self._devices is None else resolve_devices(self._devices)
        found = found[: options.device_num]
        check_together(options, len(found))
        _check_stages(options, self._micro_size)
        key = _key(options), is_loss, len(found), _shapes(batch)
        if key not in self._built:
            self._built[key] = self._build(options, found, params, batch, is_loss)
        return self._built[key]

    def _build(
        self, options: ParallelOptions, devices: Any, params: Any, batch: Any, is_loss: bool
    ) -> _Built:
        by_name = self._stage_config is not None or self._has_stages()
        if isinstance(self._network, Mapping) and (by_name or not is_loss):
            return self._by_name(self._network, options, devices, is_loss)
        if self._slices > 1:
            raise InvalidValueError(
                "Sequences can be cut where layers say what they carry from slice to slice, so slices "
                "need layers by name with stage_config. Received: "
                f"slices={self._slices}, and a network that is cut automatically"
            )
        if not is_loss:
            raise InvalidValueError(
                "Only layers by name can predict; a function returns its loss. Received: a function"
            )
        return self._searched(options, devices, params, batch)

    def _has_stages(self) -> bool:
        layers = self._network.values() if isinstance(self._network, Mapping) else ()
        return any(hasattr(_function(layer), "pipeline_stage") for layer in layers)

    def _by_name(
        self,
        network: Mapping[str, Callable[..., Any] | Stage],
        options: ParallelOptions,
        devices: Any,
        is_loss: bool,
    ) -> _Built:
        stages, chunks = options.pipeline_stages, options.pipeline_segments
        made = schedule(_scheduler(options), stages, self._micro_size, chunks, self._slices)
        groups: list[list[str]] = [[] for _ in range(made.positions)]
        stage = segment = last = 0
        for name, layer in network.items():
            given = getattr(_function(layer), "pipeline_stage", stage)
            stage = (self._stage_config or {}).get(name, given)
            segment = (self._segment_config or {}).get(name, segment)
            if not 0 <= stage < stages or not 0 <= segment < chunks:
                raise InvalidValueError(
                    f"There are {stages} stages of {chunks} chunk(s). Received: stage {stage}, "
                    f"segment {segment} for {name!r}"
                )
            position = made.position(stage, segment)
            if position < last:
                raise InvalidValueError(
                    "Layers go through the stages in the order of the model. Received: "
                    f"{name!r} at stage {stage}, segment {segment}, after a later one"
                )
            last = position
            groups[position].append(name)
        if not all(groups):
            empty = groups.index([])
            raise InvalidValueError(
                "Every stage needs a layer; name them in stage_config and segment_config. "
                f"Received: none for stage {made.placement[empty]}"
            )
        parts = [_chain(network, names) for names in groups]
        pipe = pipeline(
            parts,
            made,
            self._micro_size,
            loss=None if is_loss else _unused_loss,
            chunks=chunks,
            slices=self._slices,
            devices=devices,
        )

        def split(params: Mapping[str, Any]) -> list[Any]:
            return [{name: params[name] for name in names} for names in groups]

        def joined(nests: Sequence[Mapping[str, Any]]) -> Any:
            merged = {name: x for nest in nests for name, x in nest.items()}
            return {name: merged[name] for name in network}

        return _Built(pipe, split, joined, None)

    def _searched(self, options: ParallelOptions, devices: Any, params: Any, batch: Any) -> _Built:
        network = self._network
        function = _whole(network) if isinstance(network, Mapping) else network
        most = options.pipeline_stages
        counts = [n for n in range(1, most + 1) if most % n == 0] if options.auto_pipeline else [most]
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), batch)
        name = _scheduler(options)
        chunks = options.pipeline_segments if most > 1 else 1
        plan = search_pipeline(
            function,
            params,
            shapes,
            len(devices),
            micro_batches=self._micro_size,
            stages=counts,
            schedules=[name],
            chunks=chunks,
        )
        found = plan.pipeline
        assert found is not None
        rows = sizes(np.shape(jax.tree.leaves(batch)[0])[0], self._micro_size)[0]
        micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), shapes)
        cut: CutFunction = cut_function(function, params, micro, found.cuts)
        pipe = pipeline(
            cut.stages,
            found.schedule,
            self._micro_size,
            shared=cut.shared,
            chunks=found.chunks,
            devices=devices,
        )
        return _Built(pipe, cut.split, cut.joined, plan)


class Pipeline(PipelineCell):
    """`PipelineCell` by the name that newer versions of MindSpore have for it."""


@dataclass(frozen=True)
class _Built:
    """Stages, and how parameters are cut for them."""

    pipe: Pipelined
    split: Callable[[Any], list[Any]]
    joined: Callable[[Sequence[Any]], Any]
    plan: Plan | None


def _key(options: ParallelOptions) -> Any:
    return tuple(
        getattr(options, name)
        for name in ("pipeline_stages", "pipeline_segments", "pipeline_scheduler", "auto_pipeline")
    )


def _shapes(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((np.shape(x), jnp.result_type(x)) for x in leaves)


def _scheduler(options: ParallelOptions) -> str:
    name = options.pipeline_scheduler
    return "interleaved" if name == "1f1b" and options.pipeline_segments > 1 else name


def _check_stages(options: ParallelOptions, micro_size: int) -> None:
    if options.pipeline_stages == 1:
        return
    if options.parallel_mode not in AUTO_MODES:
        raise InvalidOptionsError(
            "To enable the pipeline parallel, please set the parallel mode to semi_auto_parallel or "
            "auto_parallel with sharding_propagation or recursive_programming. "
            f"Received: parallel_mode={options.parallel_mode!r}"
        )
    if micro_size < options.pipeline_stages:
        raise InvalidValueError(
            "There must be at least as many micro batches as stages. "
            f"Received: micro_size={micro_size}, pipeline_stages={options.pipeline_stages}"
        )


def _chain(network: Mapping[str, Callable[..., Any] | Stage], names: Sequence[str]) -> Stage:
    """Some layers as one stage; it carries what its layers carry, by their names."""
    carrying = [n for n in names if getattr(network[n], "carries", False)]

    def chained(params: Mapping[str, Any], x: Any, *others: Any) -> Any:
        before: Mapping[str, Any] = {}
        if carrying:
            *others, given = others  # type: ignore[assignment]
            before = given or {}
        after = {}
        for name in names:
            more = others if name == names[-1] else ()
            if name in carrying:
                x, after[name] = _function(network[name])(params[name], x, *more, before.get(name))
            else:
                x = _function(network[name])(params[name], x, *more)
        return (x, after) if carrying else x

    return Stage(chained, carries=bool(carrying))


def _whole(network: Mapping[str, Callable[..., Any] | Stage]) -> Callable[..., Any]:
    found = _chain(network, list(network))
    if found.carries:
        raise InvalidValueError(
            "Layers that carry something from slice to slice need stage_config. Received: none"
        )
    return found.function


def _unused_loss(y: Any, *_: Any) -> Any:
    return jnp.sum(jnp.stack([jnp.sum(x) for x in jax.tree.leaves(y)]))


class GradAccumulation:
    """A loss whose gradients are those of one micro batch after the other, summed in 32 bits.

    Args:
        network: a loss: the mean over a batch.
        micro_size: into how many micro batches a batch is cut; the last may be smaller or empty.

    Examples:
        >>> import jax.numpy as jnp
        >>> cell = GradAccumulation(lambda w, x: jnp.mean(w * x), 2)
        >>> [float(x) for x in cell.value_and_grad(2.0, jnp.arange(3.0))]
        [2.0, 1.0]
    """

    def __init__(self, network: Callable[..., Any], micro_size: int) -> None:
        _check_network(type(self).__name__, network)
        _check_count(type(self).__name__, "micro_size", micro_size)
        self._network, self._count = network, micro_size
        self._differentiated = jax.jit(jax.value_and_grad(network))

    def __call__(self, params: Any, *batch: Any) -> Any:
        """The loss of a batch."""
        return sum(w * self._network(params, *part) for w, part in _weighed(batch, self._count))

    def value_and_grad(self, params: Any, *batch: Any) -> tuple[Any, Any]:
        """The loss of a batch and its gradients."""
        total: Any = None
        for weight, part in _weighed(batch, self._count):
            found = self._differentiated(params, *part)
            wide = jax.tree.map(lambda x: x.astype("float32") if is_narrow(x) else x, found)
            share = jax.tree.map(lambda x, w=weight: w * x, wide)
            total = share if total is None else jax.tree.map(jnp.add, total, share)
        value, gradients = total
        return value, jax.tree.map(lambda g, w: g.astype(jnp.result_type(w)), gradients, params)


class MicroBatchInterleaved:
    """A loss of several parts of the batch in one program, so that XLA can overlap them.

    One part can communicate while another computes.

    Args:
        network: a loss: the mean over a batch.
        interleave_num: into how many parts a batch is cut.

    Examples:
        >>> import jax.numpy as jnp
        >>> float(MicroBatchInterleaved(lambda w, x: jnp.mean(w * x))(2.0, jnp.arange(3.0)))
        2.0
    """

    def __init__(self, network: Callable[..., Any], interleave_num: int = 2) -> None:
        _check_network(type(self).__name__, network)
        _check_count(type(self).__name__, "interleave_num", interleave_num)
        self._network, self._count = network, interleave_num

    def __call__(self, params: Any, *batch: Any) -> Any:
        """The loss of a batch."""
        return sum(w * self._network(params, *part) for w, part in _weighed(batch, self._count))


def _weighed(batch: Sequence[Any], count: int) -> list[tuple[float, tuple[Any, ...]]]:
    """The parts of a batch that are not empty, and how much each counts."""
    rows = np.shape(jax.tree.leaves(tuple(batch))[0])[0]
    found, first = [], 0
    for size in sizes(rows, count):
        if size:
            here = slice(first, first + size)
            found.append((size / rows, tuple(jax.tree.map(lambda x, h=here: x[h], a) for a in batch)))
        first += size
    return found


class PipelineGradReducer:
    """Divides gradients of a pipeline by the scale of its loss.

    Gradients here are already those of the whole batch, also of micro batches of different sizes, so
    the scale is that of the loss alone, and not the number of micro batches.

    Args:
        parameters: to be updated; not needed here.
        scale_sense: what the loss was multiplied by.
        opt_shard: nothing here; `Pipelined.optimizer` divides states.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> px.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
        >>> PipelineGradReducer([], 4.0)([jnp.float32(8.0)])
        [Array(2., dtype=float32)]
        >>> px.reset_auto_parallel_context()
    """

    def __init__(
        self, parameters: Any, scale_sense: float = 1.0, opt_shard: bool | None = None
    ) -> None:
        mode = current_options().parallel_mode
        if mode not in AUTO_MODES:
            raise InvalidOptionsError(
                f"{mode} can not use PipelineGradReducer in graph mode. Set parallel_mode to "
                f"semi_auto_parallel or auto_parallel. Received: parallel_mode={mode!r}"
            )
        self._scale = scale_sense

    def __call__(self, grads: Any) -> Any:
        """The gradients of the loss without its scale."""
        return jax.tree.map(lambda g: g / jnp.asarray(self._scale, g.dtype), grads)
