"""The mode in which a program is being traced, for the functions that act by it.

A step is the same in all modes. What differs is in `value_and_grad` and in `shard`, which look here.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from phalanx.collectives.packing import TOGETHER, UNPACKED, Packing
from phalanx.collectives.sums_in_programs import reduce_over_replicas
from phalanx.core.reduction import ReduceOp, divide
from phalanx.errors import InvalidTypeError
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.placing import names_of
from phalanx.parallel.storing import Known, like, stored
from phalanx.parallel.wide_sums import is_narrow
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import REPLICA_AXIS

__all__ = ["LaysOut", "ParallelRun", "combined", "current_run", "in_run", "value_and_grad"]


class LaysOut(Protocol):
    """Who lays out losses in a mode that searches."""

    def laid_out(
        self, loss: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int]
    ) -> Callable[..., Any]:
        """The loss with the layouts of a plan in it."""


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
        known: the layouts of parameters, in a mode that sees whole arrays.
    """

    mesh: Mesh | None
    options: ParallelOptions
    divided: bool = False
    combines: bool = False
    layerwise: frozenset[str] = frozenset()
    planner: LaysOut | None = None
    known: Known = field(default_factory=dict)


_running: contextvars.ContextVar[ParallelRun | None] = contextvars.ContextVar(
    "parallel run", default=None
)


def current_run() -> ParallelRun | None:
    """The mode in which a program is being traced here, if it is in one."""
    return _running.get()


@contextlib.contextmanager
def in_run(run: ParallelRun | None) -> Iterator[None]:
    """Trace a block of code in a mode."""
    token = _running.set(run)
    try:
        yield
    finally:
        _running.reset(token)


def value_and_grad(
    loss: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
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

    Examples:
        >>> import jax.numpy as jnp
        >>> value_and_grad(lambda w, x: jnp.sum(w * x))(2.0, jnp.arange(3.0))
        (Array(6., dtype=float32), Array(3., dtype=float32, weak_type=True))
    """
    if not callable(loss):
        raise InvalidTypeError(f"loss must be a function. Received: {shown(loss)}")

    def differentiated(*args: Any) -> Any:
        run = current_run()
        function = loss
        if run is not None and run.planner is not None:
            function = run.planner.laid_out(loss, args, argnums)
        if run is not None and run.known and run.options.optimizer_level == "level3":
            function = _gathering_again(function, argnums, run)
        with in_run(None if run is None else replace(run, combines=False, planner=None)):
            value, gradients = jax.value_and_grad(function, argnums, has_aux)(*args)
        if run is None:
            return value, gradients
        names = _names(gradients, argnums)
        if not run.combines:
            return value, _cut(gradients, names, run)
        total, aux = value if has_aux else (value, None)
        own = [name in run.layerwise for name in names]
        total, gradients = combined(run.options, total, gradients, own)
        return ((total, aux) if has_aux else total), gradients

    return differentiated


def _names(nest: Any, argnums: int | Sequence[int]) -> list[str]:
    """The names of gradients, without the numbers of arguments."""
    names = names_of(nest)
    return names if isinstance(argnums, int) else [n.partition("/")[2] or n for n in names]


def _cut(gradients: Any, names: Sequence[str], run: ParallelRun) -> Any:
    """Gradients in the parts in which the parameters are kept, if the optimizer's level says so."""
    options = run.options
    if not options.enable_parallel_optimizer or options.optimizer_level in (None, "level1"):
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

    def gathered(arg: Any) -> Any:
        leaves, structure = jax.tree.flatten(arg)
        whole = [
            _constrained(x, n, run, is_stored=False) for x, n in zip(leaves, names_of(arg), strict=True)
        ]
        return jax.tree.unflatten(structure, whole)

    def again(*args: Any) -> Any:
        chosen = {i % len(args) for i in numbers}
        return loss(*(gathered(arg) if i in chosen else arg for i, arg in enumerate(args)))

    return jax.checkpoint(again, policy=_is_kept)


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether the gradient gets a result of the forward program, and need not compute it again."""
    return bool(primitive.name != "sharding_constraint")


def combined(
    options: ParallelOptions, value: Any, gradients: Any, own: Sequence[bool]
) -> tuple[Any, Any]:
    """The loss and its gradients of all devices, from those of each.

    Gradients of parameters of which each device has its own part are complete already, because what the
    program communicates is differentiated too.

    Args:
        options: that are in force.
        value: of the loss.
        gradients: as a nest.
        own: which of them belong to parameters of which each device has its own part.
    """
    leaves, structure = jax.tree.flatten(gradients)
    op = ReduceOp.MEAN if options.gradients_mean else ReduceOp.SUM
    shared = [i for i, is_own in enumerate(own) if not is_own]
    given = [_wide(value), *(_wide(leaves[i]) for i in shared)]
    summed = _summed(options, op, given)
    found = list(leaves)
    for i, x in zip(shared, summed[1:], strict=True):
        found[i] = x.astype(leaves[i].dtype)
    if op is ReduceOp.MEAN:
        count = lax.axis_size(REPLICA_AXIS)
        found = [divide(x, count) if is_own else x for x, is_own in zip(found, own, strict=True)]
    return summed[0].astype(jnp.asarray(value).dtype), jax.tree.unflatten(structure, found)


def _summed(options: ParallelOptions, op: ReduceOp, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """The loss and gradients of all devices, in as many messages as the options of fusion say.

    By default small ones travel together, which is fastest.
    """
    fusion = options.comm_fusion
    chosen = fusion["allreduce"]
    ends = options.all_reduce_fusion_config
    if not fusion["openstate"]:
        return reduce_over_replicas(op, xs, UNPACKED)
    if chosen["mode"] == "index":
        ends = tuple(chosen["config"])
    if ends:  # of packs of gradients, the first of which has the loss too
        bounds = [0, *(end + 2 for end in ends if end + 2 < len(xs)), len(xs)]
        packs = [xs[a:b] for a, b in itertools.pairwise(bounds)]
        return [x for pack in packs for x in reduce_over_replicas(op, pack, TOGETHER)]
    if chosen["mode"] == "size":
        size = chosen["config"] << 20
        return reduce_over_replicas(op, xs, Packing(bytes_per_pack=size) if size else UNPACKED)
    return reduce_over_replicas(op, xs, Packing())


def _wide(x: Any) -> jax.Array:
    """What is summed: 16-bit numbers lose too much in sums."""
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if is_narrow(x) else x
