"""Making the steps of a distributed iterator: read, agreed on by all workers, and put on devices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from phalanx.data.distribute.device_transfer import DeviceTransfer
from phalanx.data.distribute.rebatching import Position
from phalanx.data.distribute.steps import PerReplicaStepReader, Shape, Step, StepReader, shapes_on_all
from phalanx.errors import AbortedError
from phalanx.runtime.interrupts import uninterrupted

_FAILED = "failed"


class StepProgress(NamedTuple):
    """Where an iterator is: the rows that this worker has delivered, and the steps of all workers."""

    position: Position
    steps: int


class StepProducer:
    """Reads steps and brings them to the devices; runs in a thread that must not keep its iterator."""

    def __init__(
        self,
        start: StepProgress,
        open_reader: Callable[[], StepReader | PerReplicaStepReader],
        transfer: DeviceTransfer,
        without_rows: Callable[[], Step],
        meet: Callable[[Any, threading.Event], list[Any]] | None,
        replicas: int,
    ) -> None:
        self._progress, self._replicas = start, replicas
        self._open_reader, self._transfer = open_reader, transfer
        self._without_rows, self._meet = without_rows, meet
        self._reader: StepReader | PerReplicaStepReader | None = None
        self._given_up = threading.Event()

    def __iter__(self) -> Iterator[tuple[Any, StepProgress]]:
        with self._failing_together():
            reader = self._reader = self._open_reader()
        nothing: Step | None = None
        try:
            while not self._given_up.is_set():
                with self._failing_together():
                    step = reader.next()
                goes_on, shapes = self._agree(step)
                if not goes_on:
                    return
                if nothing is None and self._meet is not None:
                    nothing = self._without_rows() if step is None else step.without_rows()
                rows = step
                if rows is None:
                    assert nothing is not None
                    assert shapes is not None
                    rows = nothing.with_shapes([(0, *leaf[0][1:]) for leaf in shapes])
                position = self._progress.position if step is None else step.position
                self._progress = StepProgress(position, self._progress.steps + 1)
                yield self._transfer.element(rows, shapes), self._progress
        finally:
            reader.close()

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Let the other workers know of a failure: they wait for this one in every step."""
        try:
            yield
        except Exception as error:
            if self._meet is not None and not self._given_up.is_set():
                self._meet({_FAILED: f"{type(error).__name__}: {error}"}, self._given_up)
            raise

    def _agree(self, step: Step | None) -> tuple[bool, list[list[Shape]] | None]:
        """Whether any worker has rows, and the shapes of each leaf, if there are other workers.

        Workers that read different rows go on until all have ended.
        """
        if self._meet is None:
            return step is not None, None
        said = self._meet(self._replicas if step is None else step.shapes(), self._given_up)
        for worker, what in enumerate(said):
            if isinstance(what, dict):
                raise AbortedError(f"The input of worker {worker} failed: {what[_FAILED]}")
        shapes = shapes_on_all(said)
        return shapes is not None, shapes

    def cancel(self) -> None:
        """Wake the thread that waits in it; may be called by any thread."""
        with uninterrupted():
            self._given_up.set()
        if self._reader is not None:
            self._reader.cancel()
