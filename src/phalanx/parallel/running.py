"""The mode in which a program is being traced, for the functions that act by it.

A step is the same in all modes. What differs is in `value_and_grad` and in `shard`, which look here.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.core.reduction import ReduceOp, divide
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parallel.communication import Share, combination, communication_of
from phalanx.parallel.context import current_options
from phalanx.parallel.local_norms import tell_norms, tell_norms_of_parts
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.placing import names_of
from phalanx.parallel.sliced_steps import SlicedStep
from phalanx.parallel.storing import Known, like, stored
from phalanx.parallel.wide_sums import is_narrow, with_wide_gradients
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer
from phalanx.runtime.placement import REPLICA_AXIS
from phalanx.train.accumulate import accumulated

__all__ = [
    "LaysOut",
    "ParallelRun",
    "combined",
    "current_run",
    "finished_gradients",
    "gathered",
    "in_run",
    "keeping_no_gathers",
    "value_and_grad",
]


class LaysOut(Protocol):
    """Who lays out losses in a mode that searches."""

    def laid_out(
        self, loss: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int]
    ) -> Callable[..., Any]:
        """The loss with the layouts of a plan in it."""


_runs = itertools.count(1)
_cache_key = jax.make_user_context(None)


@dataclass(frozen=True)
class ParallelRun:
    """The mode in which a program is traced.

    Args:
        mesh: the devices; None while a plan is searched on any.
        options: that are in force.
        divided: whether the program sees one device's part of the batch.
        combines: whether `value_and_grad` combines what the devices have; it does once, at the outside.
        layerwise: the names of parameters of which each device has its own part.
        planner: who lays out losses, in a mode that searches.
        slices: who computes losses, where each device has a part of the state.
        known: the layouts of parameters, in a mode that sees whole arrays.
        share: the part of the batch that the program sees, if devices have unequal ones.
    """

    mesh: Mesh | None
    options: ParallelOptions
    divided: bool = False
    combines: bool = False
    layerwise: frozenset[str] = frozenset()
    planner: LaysOut | None = None
    slices: SlicedStep | None = None
    known: Known = field(default_factory=dict)
    share: Share | None = None
    number: int = field(init=False, compare=False, default_factory=functools.partial(next, _runs))

    @functools.cached_property
    def inside(self) -> ParallelRun:
        """The same for losses, when something outside of them has a plan and combines gradients."""
        return replace(self, combines=False, planner=None)


_running: contextvars.ContextVar[ParallelRun | None] = contextvars.ContextVar(
    "parallel run", default=None
)


def current_run() -> ParallelRun | None:
    """The mode in which a program is being traced here, if it is in one."""
    return _running.get()


@contextlib.contextmanager
def in_run(run: ParallelRun | None) -> Iterator[None]:
    """Trace a block of code in a mode.

    Functions of `jax.jit` in it are traced anew for each run, because what they were traced to
    elsewhere may be for another mode, or for other options.
    """
    token = _running.set(run)
    try:
        with _cache_key(None if run is None else run.number):
            yield
    finally:
        _running.reset(token)


def value_and_grad(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    micro_batches: int = 1,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for steps that run in any mode.

    In a program of one device, and in one that sees the whole batch, it is `jax.value_and_grad`. In
    ``data_parallel`` and ``hybrid_parallel`` each device has a part of the batch; then the value and
    the gradients are summed over the devices, or averaged if ``gradients_mean`` is set. In
    ``auto_parallel`` the loss is laid out by the plan.

    Args:
        loss: a function of parameters and a batch.
        argnums: which of its arguments are parameters.
        has_aux: whether it returns a pair, of which the second is not differentiated.
        micro_batches: into how many pieces the batch is cut; one after the other is computed, which
            needs less memory. Their losses and gradients are summed, or averaged if ``gradients_mean``
            is set.

    Examples:
        >>> import jax.numpy as jnp
        >>> value_and_grad(lambda w, x: jnp.sum(w * x))(2.0, jnp.arange(3.0))
        (Array(6., dtype=float32), Array(3., dtype=float32, weak_type=True))
    """
    if not callable(loss):
        raise InvalidTypeError(f"loss must be a function. Received: {shown(loss)}")
    check_integer(micro_batches, "micro_batches", 1, 2**31 - 1)
    if has_aux and micro_batches > 1:
        raise InvalidValueError(
            "A batch in pieces gives one loss and one gradient, and further results of each piece, "
            f"which cannot be combined. Received: has_aux=True and micro_batches={micro_batches}"
        )

    def differentiated(*args: Any) -> Any:
        run = current_run()
        numbers = sorted({i % len(args) for i in ((argnums,) if isinstance(argnums, int) else argnums)})
        if run is not None and run.slices is not None:
            return _requested(run, loss, args, argnums, numbers, micro_batches)
        function = loss
        if run is not None and run.planner is not None:
            function = run.planner.laid_out(loss, _first_piece(args, numbers, micro_batches), argnums)
        if run is not None and run.known and run.options.optimizer_level == "level3":
            function = _gathering_again(function, argnums, run)
        options = current_options() if run is None else run.options
        gradient = jax.value_and_grad(function, argnums, has_aux)
        if options.gradient_fp32_sync and run is not None and not run.combines:
            gradient = with_wide_gradients(gradient)
        with in_run(None if run is None else run.inside):
            if micro_batches == 1:
                value, gradients = gradient(*args)
            else:
                value, gradients = _in_pieces(gradient, args, numbers, micro_batches, run)
                if options.gradients_mean:
                    value, gradients = jax.tree.map(
                        lambda x: divide(x, micro_batches), (value, gradients)
                    )
        if run is None:
            return value, gradients
        names = _names(gradients, argnums)
        if not run.combines:
            return value, finished_gradients(gradients, names, run)
        total, aux = value if has_aux else (value, None)
        own = [name in run.layerwise for name in names]
        tell_norms(run.options, list(zip(names, jax.tree.leaves(gradients), strict=True)))
        total, gradients = combined(run.options, total, gradients, own, run.share)
        return ((total, aux) if has_aux else total), gradients

    return differentiated


def _requested(
    run: ParallelRun,
    loss: Callable[..., Any],
    args: Sequence[Any],
    argnums: int | Sequence[int],
    numbers: Sequence[int],
    micro_batches: int,
) -> Any:
    """The same, where each device has a part of the state."""
    assert run.slices is not None
    nest = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
    inner = replace(run, combines=False, slices=None)

    def traced(*args: Any) -> Any:
        with in_run(inner):
            return loss(*args)

    names = [name for i in numbers for name in names_of(args[i])]
    value, gradients = run.slices.request(traced, args, numbers, names, micro_batches)
    if isinstance(argnums, int):
        return value, jax.tree.unflatten(jax.tree.structure(nest), gradients)
    counts = [len(jax.tree.leaves(args[i])) for i in numbers]
    starts = dict(zip(numbers, itertools.accumulate(counts, initial=0), strict=False))
    chosen = [
        jax.tree.unflatten(
            jax.tree.structure(args[i % len(args)]),
            gradients[starts[i % len(args)] :][: len(jax.tree.leaves(args[i % len(args)]))],
        )
        for i in argnums
    ]
    return value, tuple(chosen)


def _first_piece(args: Sequence[Any], numbers: Sequence[int], pieces: int) -> Sequence[Any]:
    """The arguments of a loss, with the first piece of a batch."""
    if pieces == 1:
        return args
    return [
        arg if i in numbers else jax.tree.map(lambda x: x[: x.shape[0] // pieces], arg)
        for i, arg in enumerate(args)
    ]


def _in_pieces(
    gradient: Callable[..., Any],
    args: Sequence[Any],
    numbers: Sequence[int],
    pieces: int,
    run: ParallelRun | None,
) -> Any:
    """The sums of the losses and gradients of the pieces of a batch."""
    batch = {i: arg for i, arg in enumerate(args) if i not in numbers}

    def piece(*part: Any) -> Any:
        known = dict(zip(batch, part, strict=True))
        return gradient(*(known.get(i, arg) for i, arg in enumerate(args)))

    def cut(gradients: Any) -> Any:
        assert run is not None
        return _cut(gradients, names_of(gradients), run, always=True)

    early = run is not None and bool(run.known) and bool(run.options.gradient_accumulation_shard)
    return accumulated(piece, tuple(batch.values()), pieces, *([cut] if early else []))


def finished_gradients(gradients: Any, names: Sequence[str], run: ParallelRun) -> Any:
    """Gradients of a program that sees whole arrays, as its options say."""
    options, mesh = run.options, run.mesh
    if mesh is not None and not options.loss_repeated_mean:
        # Every device has the loss, and each counts it.
        gradients = jax.tree.map(lambda g: g * mesh.size, gradients)
    gradients = _cut(gradients, names, run)
    if mesh is not None:
        leaves = jax.tree.leaves(gradients)
        specs = [
            like(name, x.shape, run.known) or PartitionSpec()
            for name, x in zip(names, leaves, strict=True)
        ]
        tell_norms_of_parts(options, list(zip(names, leaves, strict=True)), specs, mesh)
    return gradients


def _names(nest: Any, argnums: int | Sequence[int]) -> list[str]:
    """The names of gradients, without the numbers of arguments."""
    names = names_of(nest)
    return names if isinstance(argnums, int) else [n.partition("/")[2] or n for n in names]


def _cut(gradients: Any, names: Sequence[str], run: ParallelRun, always: bool = False) -> Any:
    """Gradients in the parts in which the parameters are kept, if the optimizer's level says so."""
    options = run.options
    is_whole = options.optimizer_level in (None, "level1") and not always
    if not options.enable_parallel_optimizer or is_whole:
        return gradients
    leaves, structure = jax.tree.flatten(gradients)
    found = [_constrained(g, n, run, is_stored=True) for g, n in zip(leaves, names, strict=True)]
    return jax.tree.unflatten(structure, found)


def _constrained(x: Any, name: str, run: ParallelRun, is_stored: bool) -> Any:
    spec = like(name, x.shape, run.known)
    if spec is None or run.mesh is None:
        return x
    if is_stored:
        spec = stored(spec, x, run.mesh, run.options)
    return lax.with_sharding_constraint(x, NamedSharding(run.mesh, spec))


def _gathering_again(
    loss: Callable[..., Any], argnums: int | Sequence[int], run: ParallelRun
) -> Callable[..., Any]:
    """A loss that gathers parameters, and for its gradient once more instead of keeping them."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def again(*args: Any) -> Any:
        chosen = {i % len(args) for i in numbers}
        given = [
            gathered(arg, names_of(arg), run) if i in chosen else arg for i, arg in enumerate(args)
        ]
        return loss(*given)

    return keeping_no_gathers(again)


def gathered(arg: Any, names: Sequence[str], run: ParallelRun) -> Any:
    """A nest of parameters as the program computes with them, not as they are kept."""
    leaves, structure = jax.tree.flatten(arg)
    whole = [_constrained(x, n, run, is_stored=False) for x, n in zip(leaves, names, strict=True)]
    return jax.tree.unflatten(structure, whole)


def keeping_no_gathers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose gradient gathers again what it has gathered."""
    again: Callable[..., Any] = jax.checkpoint(function, policy=_is_kept)
    return again


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether the gradient gets a result of the forward program, and need not compute it again."""
    return bool(primitive.name != "sharding_constraint")


def combined(
    options: ParallelOptions,
    value: Any,
    gradients: Any,
    own: Sequence[bool],
    share: Share | None = None,
) -> tuple[Any, Any]:
    """The loss and its gradients of all devices, from those of each.

    Gradients of parameters of which each device has its own part are complete already, because what the
    program communicates is differentiated too.

    Args:
        options: that are in force.
        value: of the loss, which travels with the last gradients.
        gradients: as a nest.
        own: which of them belong to parameters of which each device has its own part.
        share: this device's part of the batch, if devices have unequal ones.
    """
    leaves, structure = jax.tree.flatten(gradients)
    op, value = combination(options), jnp.asarray(value)
    if share is not None:
        value, *leaves = (share.weighted(op, x) for x in (value, *leaves))
    shared = [i for i, is_own in enumerate(own) if not is_own]
    wide = value.astype(jnp.float32) if is_narrow(value) else value
    *sums, total = communication_of(options).summed(op, [*(leaves[i] for i in shared), wide])
    found = list(leaves)
    for i, x in zip(shared, sums, strict=True):
        found[i] = x
    if op is ReduceOp.MEAN:
        count = lax.axis_size(REPLICA_AXIS)
        found = [divide(x, count) if is_own else x for x, is_own in zip(found, own, strict=True)]
    return total.astype(value.dtype), jax.tree.unflatten(structure, found)
