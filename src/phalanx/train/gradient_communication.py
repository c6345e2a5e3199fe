"""`GradientCommunication`: how gradients, and parameters in slices, travel between replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.collectives import slices_in_programs, sums_in_programs
from phalanx.collectives.packing import UNPACKED, Packing, leaving_packs
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.options import CommunicationOptions
from phalanx.core.reduction import ReduceOp
from phalanx.core.slicing import Members
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.strategy import Strategy
from phalanx.core.values import Mirrored, PerReplica, ReplicaValues
from phalanx.core.variables.traced_variables import compile_with
from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import REPLICA_AXIS

__all__ = ["GradientCommunication", "dense", "norm_of"]

AUTO_MEGABYTES = 64
"""Up to how many megabytes MindSpore fuses in the mode "auto"."""


_USUAL = Packing()


@dataclass(frozen=True)
class GradientCommunication:
    """How gradients travel between replicas, and parameters that are in slices.

    `from_options` makes it from MindSpore's options.

    Args:
        all_reduce: which gradients are summed together; None lets the strategy choose.
        reduce_scatter: the same for gradients that are summed in slices.
        all_gather: the same for parameters that are joined from slices.
        float32: whether to sum gradients of 16 bits in float32.
        local_norms: called in each step for each gradient and replica, before anything is combined,
            with the name of the variable, the number of the replica, and the Euclidean norm of its
            gradient. MindSpore's `dump_local_norm` prints or saves it. It may be called in any order
            and from another thread, and must not use JAX.
    """

    all_reduce: Packing | None = None
    reduce_scatter: Packing = _USUAL
    all_gather: Packing = _USUAL
    float32: bool = False
    local_norms: Callable[[str, int, float], None] | None = None

    @staticmethod
    def from_options(
        comm_fusion: Mapping[str, Any] | None = None,
        all_reduce_fusion_config: Sequence[int] = (),
        float32: bool = False,
        local_norms: Callable[[str, int, float], None] | None = None,
    ) -> GradientCommunication:
        """What MindSpore's options say.

        Args:
            comm_fusion: `openstate` and, for `allreduce`, `allgather` and `reducescatter`, a `mode`
                with its `config`: "auto" fuses up to 64 MB, "size" up to `config` MB, and "index"
                begins another pack after each gradient whose number is in `config`.
            all_reduce_fusion_config: such numbers, which count for `allreduce` in any mode.
            float32: `gradient_fp32_sync` or `force_fp32_communication`.
            local_norms: what `dump_local_norm` calls.

        Examples:
            >>> fusion = {"allreduce": {"mode": "size", "config": 2}}
            >>> GradientCommunication.from_options(fusion).all_reduce.bytes_per_pack
            2097152
        """
        fusion = dict(comm_fusion or {})
        if fusion.get("openstate") is False:
            return GradientCommunication(UNPACKED, UNPACKED, UNPACKED, float32, local_norms)
        indices = tuple(all_reduce_fusion_config)
        reduce = Packing(ends=indices) if indices else _packing(fusion.get("allreduce"), True)
        return GradientCommunication(
            reduce,
            _packing(fusion.get("reducescatter"), False) or _USUAL,
            _packing(fusion.get("allgather"), False) or _USUAL,
            float32,
            local_norms,
        )

    def tell_norms(
        self, strategy: Strategy, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        """Call `local_norms`; in cross-replica context."""
        tell = self.local_norms
        if tell is None:
            return
        for gradient, variable in zip(gradients, variables, strict=True):
            name = variable.name
            if isinstance(gradient, SpmdPerReplica):
                self.tell_norm(name, dense(gradient, variable))
            elif isinstance(gradient, PerReplica):
                first = strategy.extended._first_replica
                for i, x in enumerate(gradient.values):
                    tell(name, first + i, float(norm_of(dense(x, variable))))

    def tell_norm(self, name: str, gradient: jax.Array) -> None:
        """Call `local_norms` for this replica's gradient; in programs."""
        if self.local_norms is not None:
            tell = functools.partial(_told, self.local_norms, name)
            jax.debug.callback(tell, lax.axis_index(REPLICA_AXIS), norm_of(gradient))

    def combined(self, strategy: Strategy, op: ReduceOp, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Combine gradients, each for a variable, over all replicas; in cross-replica context."""
        values = [x for x, _ in pairs]
        if self.float32:
            values = [_on_arrays(_widened, x) for x in values]
        reduced = self._reduced(strategy, op, values, [v for _, v in pairs])
        if not self.float32:
            return reduced
        return [_on_arrays(_like(v), x) for x, (_, v) in zip(reduced, pairs, strict=True)]

    def _reduced(
        self, strategy: Strategy, op: ReduceOp, values: list[Any], variables: list[Any]
    ) -> list[Any]:
        chosen = self.all_reduce
        arrays = [] if chosen is None else [i for i, x in enumerate(values) if _is_local_array(x)]
        results: dict[int, Any] = {}
        if chosen is not None and arrays:
            device = strategy.extended._replica_devices[0]
            compile_with(leaving_packs(device.platform if device else jax.default_backend()))
            sums = self.summed(op, [values[i].component(0) for i in arrays])
            count = strategy.num_replicas_in_sync
            results |= {i: Mirrored.of_global(x, count) for i, x in zip(arrays, sums, strict=True)}
        others = [i for i in range(len(values)) if i not in results]
        if others:
            options = CommunicationOptions((chosen and chosen.bytes_per_pack) or 0)
            pairs = [(values[i], variables[i]) for i in others]
            reduced = strategy.extended.batch_reduce_to(op, pairs, options)
            results |= zip(others, reduced, strict=True)
        return [results[i] for i in range(len(values))]

    def summed(self, op: ReduceOp, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Combine local arrays over all replicas; in programs."""
        given = [_widened(x) for x in xs] if self.float32 else xs
        packing = _USUAL if self.all_reduce is None else self.all_reduce
        sums = sums_in_programs.reduce_over_replicas(op, given, packing)
        return [total.astype(x.dtype) for total, x in zip(sums, xs, strict=True)]

    def scattered(
        self, xs: Sequence[jax.Array], members: Members, mean: bool = False
    ) -> list[jax.Array]:
        """Sum local gradients over all replicas, of which each gets its slice; in programs."""
        given = [_widened(x) for x in xs] if self.float32 else xs
        parts = slices_in_programs.reduce_scatter(given, members, self.reduce_scatter, mean)
        return [part.astype(x.dtype) for part, x in zip(parts, xs, strict=True)]


def dense(gradient: Any, like: Any) -> jax.Array:
    """A gradient as an array, for a value or variable of its shape."""
    if isinstance(gradient, ReplicaValues):
        gradient = gradient.component(0)
    if isinstance(gradient, IndexedSlices):
        zeros = jnp.zeros(like.shape, like.dtype)
        return zeros.at[gradient.indices].add(gradient.values)
    return jnp.asarray(gradient)


def _packing(chosen: Any, may_index: bool) -> Packing | None:
    """What one entry of `comm_fusion` says; None if there is none."""
    if chosen is None:
        return None
    mode, config = chosen["mode"], chosen["config"]
    if mode == "index" and may_index:
        return Packing(ends=tuple(config))
    if mode not in ("auto", "size"):
        raise InvalidValueError(
            f"The mode of fusion is 'auto', 'size' or, for allreduce, 'index'. Received: {shown(mode)}"
        )
    megabytes = AUTO_MEGABYTES if mode == "auto" else config
    return Packing(bytes_per_pack=megabytes << 20) if megabytes else UNPACKED


def norm_of(gradient: jax.Array) -> jax.Array:
    """The Euclidean norm of an array."""
    return jnp.linalg.norm(gradient.astype(jnp.float32).reshape(-1))


def _told(tell: Callable[[str, int, float], None], name: str, replica: Any, norm: Any) -> None:
    tell(name, int(replica), float(norm))


def _is_local_array(x: Any) -> bool:
    return isinstance(x, SpmdPerReplica) and isinstance(x.component(0), jax.Array)


def _on_arrays(fn: Callable[[Any], Any], x: Any) -> Any:
    """A value with a function applied to its arrays; sparse rows stay as they are."""

    def on_one(x: Any) -> Any:
        return x if isinstance(x, IndexedSlices) else fn(x)

    return x.apply(on_one) if isinstance(x, ReplicaValues) else on_one(x)


def _widened(x: Any) -> Any:
    """An array in at least 32 bits."""
    x = jnp.asarray(x)
    is_short = jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4
    return x.astype(jnp.float32) if is_short else x


def _like(variable: Any) -> Callable[[Any], Any]:
    return lambda x: x.astype(variable.dtype)
