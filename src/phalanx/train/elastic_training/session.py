"""`px.train.elastic`: calls a training function again and again while workers come and go."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from phalanx.cluster.resolvers.tfconfig import TFConfigClusterResolver
from phalanx.core import context as ctx
from phalanx.core.options import CommunicationOptions
from phalanx.errors import (
    ContextError,
    DeadlineExceededError,
    HubLostError,
    InvalidTypeError,
    InvalidValueError,
    WorkerLostError,
)
from phalanx.job.bootstrap import ignore_notices
from phalanx.job.connection import connected
from phalanx.job.elastic.visitor import GenerationEntry, Released, Visitor
from phalanx.job.preflight import training_tasks
from phalanx.runtime import laboratory
from phalanx.runtime.deadlines import STUCK_EXIT_CODE
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer
from phalanx.strategies.multi_worker import MultiWorkerMirroredStrategy
from phalanx.train.elastic_training import reforming
from phalanx.train.elastic_training.batch_policy import BatchPolicy, batch_size_for, check_policy
from phalanx.train.elastic_training.carried_state import CarriedState
from phalanx.train.elastic_training.context import ElasticContext, MembershipChange, Saving
from phalanx.train.termination import RESTARTABLE_EXIT_CODE

__all__ = ["elastic"]

T = TypeVar("T")

_log = logging.getLogger("phalanx")

_CHANGES = ("died", "exited", "left", "deadline")
"""Kinds of failures after which the others go on; another one would come again."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def elastic(
    train_fn: Callable[[ElasticContext], T],
    *,
    batch_size: int,
    policy: BatchPolicy = "keep_global_batch",
    checkpoint_dir: str | None = None,
    save_every: int | None = None,
    communication_options: CommunicationOptions | None = None,
) -> T:
    """Train with workers that come and go, under ``phalanx run --workers MIN:MAX``.

    `train_fn` makes the variables under ``job.strategy``, gives them to ``job.track``, and loops over
    ``job.steps``. When a worker is lost, joins or leaves, it is called again on all workers that there
    are then, with a context that has another strategy. The state comes from the memory of the workers
    that are left, or from the newest checkpoint, and the data goes on where it was.

    Elsewhere, with a fixed number of workers or a single process, `train_fn` is called once.

    Args:
        train_fn: the training. It must make everything anew that belongs to devices: strategies,
            variables, arrays. What it returns is returned.
        batch_size: the size of the global batch, with as many workers as there may be.
        policy: ``"keep_global_batch"`` lets fewer workers have larger shares, so that the training
            stays the same. ``"scale"`` keeps each worker's share, so that the global batch changes in
            proportion. Or a function that gets the number of workers and returns the global batch.
        checkpoint_dir: where checkpoints are saved, on a file system that all workers see. The newest
            one is restored if no worker has the state in memory, also when the job is started again.
        save_every: after how many steps a checkpoint is saved, in the background.
        communication_options: of the strategy.

    Examples:
        >>> import jax.numpy as jnp
        >>> import phalanx as px
        >>> def train(job):
        ...     with job.strategy.scope():
        ...         total = px.Variable(0)
        ...     job.track(total=total)
        ...     for batch in job.steps(px.data.Dataset.range(10), epochs=2):
        ...         numbers = job.strategy.reduce("SUM", batch, axis=0)
        ...         total.assign_add(jnp.asarray(numbers, jnp.int32))
        ...     return int(total)
        >>> px.train.elastic(train, batch_size=4)
        90
    """
    if not callable(train_fn):
        raise InvalidTypeError(f"`train_fn` must be a function. Received: {shown(train_fn)}")
    size = check_integer(batch_size, "batch_size", 1)
    check_policy(policy)
    if save_every is not None:
        check_integer(save_every, "save_every", 1)
        if checkpoint_dir is None:
            raise InvalidValueError(
                f"`save_every` needs a `checkpoint_dir`. Received: save_every={shown(save_every)}"
            )
    if connected() is not None:
        raise ContextError(
            "px.train.elastic makes the strategy over several workers itself, for each generation of "
            "them. Take it from the context: job.strategy. Received: a process that has joined others"
        )
    saving = Saving(checkpoint_dir, save_every)
    session = _Session(train_fn, size, policy, saving, communication_options)
    visitor = Visitor.find()
    if visitor is None:
        return session.once()
    atexit.register(ignore_notices)
    with contextlib.closing(visitor), _notices(visitor):
        try:
            return session.run(visitor)
        except HubLostError as error:
            if not visitor.is_lost:
                raise
            _log.error("%s This worker ends. If the launcher is there, it starts another one.", error)
            sys.exit(STUCK_EXIT_CODE)


class _Session:
    """The generations of one worker."""

    def __init__(
        self,
        train_fn: Callable[[ElasticContext], Any],
        batch_size: int,
        policy: BatchPolicy,
        saving: Saving,
        options: CommunicationOptions | None,
    ) -> None:
        self._train_fn, self._batch_size, self._policy = train_fn, batch_size, policy
        self._saving, self._options = saving, options
        self._step = 0
        self._carried: CarriedState | None = None
        self._result: Any = None
        self._broken = ""  # why this process cannot join others without starting anew

    def once(self) -> Any:
        """Train with the workers that there are."""
        if len(training_tasks(TFConfigClusterResolver().cluster_spec())) > 1:
            reforming.begin_before_joining()
        strategy = MultiWorkerMirroredStrategy(communication_options=self._options)
        workers, rank = strategy.extended._input_worker
        entry = GenerationEntry(1, rank, ("",) * workers, maximum=workers)
        with contextlib.closing(self._context(strategy, entry, None)) as context:
            return self._train_fn(context)

    def run(self, visitor: Visitor) -> Any:
        """Train in one generation after the other, until all have come to the end."""
        reforming.begin_before_joining()
        before = reforming.take_over()
        if before is None:
            visitor.arrive(self._saving.directory is not None)
        else:
            self._step, self._carried = before
            visitor.stopped(self._step, self._carried is not None)
        while True:
            answer = visitor.wait()
            if isinstance(answer, Released):
                sys.exit(_exit_code(answer))
            if self._train(visitor, answer):
                return self._result
            why = self._broken or reforming.can_stay()
            if why:
                _log.warning("Python starts anew for the next generation of workers: %s.", why)
                reforming.start_anew(self._carried, self._step)
            reforming.forget_devices()
            visitor.stopped(self._step, self._carried is not None)

    def _train(self, visitor: Visitor, entry: GenerationEntry) -> bool:
        """Train in a generation; returns whether it was the last."""
        if entry.generation > 1:
            _log.warning("Generation %d, %d workers: %s.", entry.generation, entry.size, entry.reason)
        for name, value in entry.environment().items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        name = entry.names[entry.rank]
        laboratory.reach("join", generation=entry.generation, rank=entry.rank, name=name)
        context: ElasticContext | None = None
        strategy = self._met(entry, visitor)
        if strategy is None:
            return False
        depth, failed = ctx.depth(), True
        try:
            context = self._context(strategy, entry, visitor)
            self._carried = None  # the context has it, until all have it
            self._result = self._train_fn(context)
            context.close()
            laboratory.reach(laboratory.END, generation=entry.generation)
            if (connection := connected()) is not None:
                connection.come_to_end()
            laboratory.reach(laboratory.END, generation=entry.generation)  # and now it only waits
            visitor.finished(context.step)
            released = visitor.wait_for_end()
            if released is not None:
                laboratory.note("released")  # what follows is done by none else
                return True
            failed = False
        except MembershipChange:
            failed = False
        except Exception as error:
            if not self._is_change(error, visitor):
                raise
            _log.warning("Generation %d has ended: %s", entry.generation, error)
        ctx.back_to(depth)
        self._result = strategy = None
        assert context is not None
        self._step, self._carried = context.end(failed)
        context = None
        reforming.leave_cluster()
        return False

    def _is_change(self, error: Exception, visitor: Visitor) -> bool:
        """Whether an error only says that another worker is gone, or the connections of this one."""
        connection = connected()
        if connection is None:
            return False
        connection.member.cause_of(error)  # waits a moment for the hub to say who
        failure = connection.member.failure
        if failure is not None and failure.kind == "hub" and visitor.is_reachable():
            self._broken = "the connections of this worker had closed"  # JAX cannot leave its service
            return True
        return failure is not None and failure.kind in _CHANGES

    def _met(self, entry: GenerationEntry, visitor: Visitor) -> MultiWorkerMirroredStrategy | None:
        """A strategy over the workers of a generation; None if one is lost before all have met."""
        try:
            return MultiWorkerMirroredStrategy(communication_options=self._options)
        except (WorkerLostError, DeadlineExceededError, HubLostError) as error:
            if isinstance(error, HubLostError) and not visitor.is_reachable():
                raise
            _log.warning("Generation %d has not begun: %s", entry.generation, error)
            self._broken = "a worker was lost before all had met"  # JAX may be half connected
            return None

    def _context(
        self, strategy: MultiWorkerMirroredStrategy, entry: GenerationEntry, visitor: Visitor | None
    ) -> ElasticContext:
        sizes = [
            batch_size_for(self._policy, self._batch_size, workers, entry.maximum)
            for workers in (entry.size, entry.maximum)
        ]
        return ElasticContext(
            strategy,
            entry,
            sizes[0],
            sizes[1],
            self._saving,
            connected(),
            visitor,
            (self._step, self._carried),
        )


def _exit_code(released: Released) -> int:
    """How a worker ends that is not needed any more."""
    if released.why == "left":
        _log.warning("This worker has left the job, as it was asked to.")
        return RESTARTABLE_EXIT_CODE
    _log.warning("The job has ended before this worker was let in.")
    return 0


@contextlib.contextmanager
def _notices(visitor: Visitor) -> Iterator[None]:
    """Leave the job when a signal says that the machine will be taken away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: visitor.leave()) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
