"""`MultiWorkerMirroredStrategy`: synchronous training over several processes and machines."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.collectives import programs
from phalanx.collectives.cross_worker_ops import CrossWorkerOps
from phalanx.core import compat
from phalanx.core.errors import DivergenceError
from phalanx.core.options import CommunicationOptions
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.strategy import Strategy
from phalanx.core.values import PerReplica, Span, place
from phalanx.core.variable_spec import VariableSpec
from phalanx.core.variables import Variable
from phalanx.strategies.mirrored import MirroredExtended

_log = logging.getLogger("phalanx")


class MultiWorkerExtended(MirroredExtended):
    """What `MultiWorkerMirroredStrategy` does on one of several workers."""

    def __init__(
        self,
        container_strategy: Strategy,
        worker: int,
        span: Span,
        options: CommunicationOptions | None,
    ) -> None:
        local = tuple(d for d in span if d.process_index == jax.process_index())
        super().__init__(container_strategy, local, CrossWorkerOps(local, span, options))
        self._everywhere = span
        self._worker, self._workers = worker, len(span) // len(local)

    @property
    def _span(self) -> Span:
        return self._everywhere

    @property
    def _first_replica(self) -> int:
        return self._worker * len(self._devices)

    @property
    def _input_worker(self) -> tuple[int, int]:
        return self._workers, self._worker

    def _numbers(self, mine: list[int]) -> np.ndarray[Any, Any]:
        """Small numbers of all workers, one row each."""
        row = jnp.asarray(np.array([mine], np.uint32))
        rows = programs.all_gather([place(row, d) for d in self._devices], self._devices, 0, self._span)
        return np.asarray(rows.values[0])[:: len(self._devices)]

    # -- values that must agree ------------------------------------------------------------------

    def _from_first(self, value: PerReplica) -> Any:
        if isinstance(value, SpmdPerReplica):
            return value.first()
        assert isinstance(self._communicator, CrossWorkerOps)
        return self._communicator.from_first(value)

    def _require_agreement(self, value: Any, what: str) -> None:
        if compat.is_staging() or any(compat.is_tracer(x) for x in jax.tree.leaves(value)):
            return
        digests = self._numbers(_digest(value))
        if (digests != digests[0]).any():
            other = int(np.argmax((digests != digests[0]).any(axis=1)))
            raise DivergenceError(
                f"{what} would write different values on different workers, to copies that must stay "
                "equal. Combine the values first, as with strategy.reduce. "
                f"Received: values that differ between worker 0 and worker {other}; here {value!r}"
            )

    def _create_variable(self, spec: VariableSpec) -> Variable:
        def from_chief() -> jax.Array:
            values = [place(spec.value, d) for d in self._devices]
            return programs.from_first(values, self._devices, self._span).values[0]

        # A thread of its own, because variables may be made while this one traces a program.
        with ThreadPoolExecutor(1, "phalanx-initial-value") as thread:
            value = thread.submit(from_chief).result()
        return super()._create_variable(dataclasses.replace(spec, value=value))


def _digest(value: Any) -> list[int]:
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(value):
        host = np.asarray(jax.random.key_data(leaf) if compat.is_key_array(leaf) else leaf)
        hashed.update(repr((host.shape, host.dtype.str)).encode() + host.tobytes())
    return np.frombuffer(hashed.digest()[:8], np.uint32).tolist()
