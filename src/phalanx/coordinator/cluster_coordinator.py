"""`ClusterCoordinator`: gives functions to workers, and keeps count of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from phalanx.coordinator import checkpoints
from phalanx.coordinator.dispatcher import Dispatcher
from phalanx.coordinator.overview import ReportEndpoint
from phalanx.coordinator.peer import Entry
from phalanx.coordinator.per_worker import (
    PerWorkerDataset,
    check_own,
    dataset_function,
    make_resource,
)
from phalanx.coordinator.questions import Question, closed_error
from phalanx.coordinator.remote_value import PerWorkerValues, RemoteValue
from phalanx.coordinator.values import pack_arguments
from phalanx.core.strategy import Strategy
from phalanx.core.structure import map_nest
from phalanx.errors import DeadlineExceededError, InvalidTypeError, InvalidValueError
from phalanx.execution.function import Function
from phalanx.runtime.formatting import shown
from phalanx.runtime.pickling import StaysHere
from phalanx.strategies.parameter_server import ParameterServerStrategy

__all__ = ["ClusterCoordinator"]

_log = logging.getLogger(__name__)

QUEUE_LIMIT = 256 * 1024
"""How many closures may wait; then `schedule` waits."""


class _WrongStrategyError(InvalidTypeError, InvalidValueError, AttributeError):
    """Only one strategy has a coordinator. TensorFlow's code ends in an AttributeError."""


class ClusterCoordinator(StaysHere):
    """Has workers run functions, in any order, on the variables of a `px.ParameterServerStrategy`.

    There is one coordinator for each strategy. Functions run on any worker. If a worker is lost they
    run on another one; what they do to variables counts once. The first error of a function is raised
    by the next `schedule`, `join` or `done`, once; functions that have not started are then cancelled.

    Args:
        strategy: a `px.ParameterServerStrategy`.
        restore_from: a directory that `checkpoint` has written, perhaps in another process: variables
            get the values that they had, and functions that had not run are scheduled again. Make the
            same variables before, in the same order.

    Examples:
        >>> import phalanx as px
        >>> tasks = [px.Server({job: ["localhost:0"]}) for job in ("worker", "ps")]  # in this process
        >>> worker, ps = (task.target.removeprefix("grpc://") for task in tasks)
        >>> cluster = px.train.ClusterSpec({"worker": [worker], "ps": [ps]})
        >>> resolver = px.cluster_resolver.SimpleClusterResolver(cluster)
        >>> strategy = px.ParameterServerStrategy(resolver)
        >>> with strategy.scope():
        ...     total = px.Variable(0)
        >>> coordinator = px.coordinator.ClusterCoordinator(strategy)
        >>> numbers = iter(coordinator.create_per_worker_dataset(px.data.Dataset.range(100)))
        >>> @px.function
        ... def step(numbers):
        ...     number = next(numbers)
        ...     total.assign_add(number)
        ...     return number
        >>> values = [coordinator.schedule(step, args=(numbers,)) for _ in range(10)]
        >>> coordinator.join()
        >>> total.numpy(), coordinator.fetch(values[-1])
        (array(45, dtype=int32), array(9, dtype=int32))
        >>> strategy.close()
        >>> for task in tasks:
        ...     task.stop()
    """

    instead = "Give what it returns to other processes."

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _known: ClassVar[dict[int, ClusterCoordinator]] = {}
    _is_ready = _is_over = False

    def __new__(
        cls, strategy: ParameterServerStrategy, *, restore_from: str | Path | None = None
    ) -> ClusterCoordinator:
        """The coordinator of the strategy: there is one."""
        with cls._lock:
            found = cls._known.get(id(strategy))
            return super().__new__(cls) if found is None else found

    def __init__(
        self, strategy: ParameterServerStrategy, *, restore_from: str | Path | None = None
    ) -> None:
        if self._is_ready:
            if restore_from is not None:
                raise InvalidValueError(
                    "The strategy has a coordinator already, which cannot be restored any more. "
                    f"Restore it when it is first made. Received: restore_from={shown(restore_from)}"
                )
            return
        if not isinstance(strategy, ParameterServerStrategy):
            raise _WrongStrategyError(
                f"A ClusterCoordinator needs a px.ParameterServerStrategy. Received: {shown(strategy)}"
            )
        strategy.extended.check_coordinates()
        self._strategy = strategy
        found = None if restore_from is None else checkpoints.read(restore_from)
        session, first = strategy.extended.session, strategy.extended.next_closure
        if found is not None:
            found.load_variables(strategy.extended.connect())
            session = strategy.extended.go_on_from(found.state.runs)
            first = max(first, found.next_closure)
        else:
            strategy.extended.connect()
        self._session = session
        self._dispatcher = Dispatcher(
            session.workers, session.key, session.connect, session.options, first
        )
        self._dispatcher.wait = self._wait_for_value
        self._restored: list[RemoteValue] = []
        if found is not None:
            variables = strategy.extended.variables
            self._restored = found.schedule(self._dispatcher, self._wait_for_value, variables)
        self._dispatcher.start()
        self._reports = self._serve_reports()
        strategy.extended.home.when_freed.append(self._dispatcher.drop_variable)
        strategy.extended.when_closed.append(self.close)
        with self._lock:
            self._known[id(strategy)] = self
        self._is_ready = True

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    @property
    def restored(self) -> list[RemoteValue]:
        """The values of functions that a checkpoint had waiting, in the order of `schedule`."""
        return list(self._restored)

    # -- functions -------------------------------------------------------------------------------

    def schedule(
        self, fn: Function, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Let some worker call a function, later; returns at once.

        Waits only if more than 262,144 functions are waiting. Arguments are copied now.

        Args:
            fn: what `px.function` returns. Workers get it once, with the variables that it captures;
                other things that it uses are copied when it is first scheduled.
            args: its arguments. `RemoteValue` stands for a value that is not there yet;
                `PerWorkerValues` for what the worker has that runs the function.
            kwargs: its keyword arguments.

        Returns:
            What the function will have returned.
        """
        if not isinstance(fn, Function):
            raise InvalidTypeError(
                "ClusterCoordinator.schedule accepts what px.function returns, and nothing else. "
                f"Received: {shown(fn)}"
            )
        dispatcher = self._dispatcher
        if dispatcher.is_closed:
            raise closed_error()
        arguments, references = pack_arguments(args, kwargs)
        check_own(references, dispatcher)
        value = RemoteValue(self._wait_for_value)
        entry = Entry(
            dispatcher.functions.shipped(fn), arguments, references.inputs, references.resources, value
        )
        if dispatcher.queued >= QUEUE_LIMIT:
            self._wait_for(dispatcher.ask_for_room(QUEUE_LIMIT), "room in the queue")
        has_failed = dispatcher.machine.error is not None
        dispatcher.put(entry)
        if has_failed:
            self._raise(
                self._wait_for(dispatcher.ask_for_error(), "functions to end, as one has failed")
            )
        return value

    def join(self) -> None:
        """Wait until all scheduled functions have ended; raises the first error, once."""
        self._raise(self._wait_for(self._dispatcher.ask_to_join(), "all functions"))

    def done(self) -> bool:
        """Whether all scheduled functions have ended; raises the first error, once."""
        answer = self._wait_for(
            self._dispatcher.ask_whether_done(), "functions to end, as one has failed"
        )
        self._raise(answer)
        return bool(answer)

    def fetch(self, val: Any) -> Any:
        """The values in a nest: waits for each `RemoteValue` in it; everything else stays as it is.

        Args:
            val: a nest.
        """
        return map_nest(lambda x: x.fetch() if isinstance(x, RemoteValue) else x, val)

    # -- what workers have -----------------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Let every worker have a dataset: a whole copy for each, with its own order.

        A worker that is lost and comes back begins its dataset anew.

        Args:
            dataset_fn: a `px.data.Dataset`; what `experimental_distribute_dataset` or
                `distribute_datasets_from_function` returns; or a function that returns one of these,
                called on each worker.
        """
        made: PerWorkerDataset = make_resource(
            self._dispatcher, PerWorkerDataset, dataset_function(self._strategy, dataset_fn)
        )
        return made

    def create_per_worker_resource(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> PerWorkerValues:
        """Let every worker call a function and keep what it returns, for functions scheduled later.

        Args:
            fn: called once on each worker, and again on one that was lost and comes back.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        made: PerWorkerValues = make_resource(self._dispatcher, PerWorkerValues, fn, args, kwargs)
        return made

    # -- checkpoints and reports -----------------------------------------------------------------

    def checkpoint(self, directory: str | Path) -> None:
        """Write the values of all variables, and the functions that have not run, to a directory.

        Functions that run are awaited, and others begin only afterwards. The directory must be one that
        all parameter servers can write to. It is complete or not there at all. Datasets of workers
        begin anew after a restart.

        Args:
            directory: a checkpoint that is there before is replaced; anything else is an error.
        """
        dispatcher = self._dispatcher
        question = dispatcher.ask_for_quiet()
        try:
            self._wait_for(question, "functions to end, for a checkpoint")
            state = self._ask(dispatcher.pending)
            with self._strategy.extended.home.in_turn():
                checkpoints.write(
                    directory, state, self._strategy.extended.connect(), self._session.runs
                )
        finally:
            dispatcher.resume()

    def report(self) -> dict[str, Any]:
        """What happens now: the queue, what each worker does, and how it went so far.

        Returns:
            ``queued``, ``in_flight``, ``in_doubt``, ``done``, ``retried``, ``last_error``, and for each
            of the ``workers`` its ``state``, what it has ``in_flight``, its ``staleness`` (how many
            other functions may change variables while one of its own runs) and what it is ``doing``;
            and for each of the ``servers`` its ``state``, and for how many seconds it was ``silent``.
        """
        watch = self._strategy.extended.watch
        servers = [] if watch is None else watch.report()
        return {**self._ask(self._dispatcher.report), "servers": servers}

    def close(self) -> None:
        """End the connections to the workers. What has not run never will, and its values say so."""
        if self._is_over:  # the strategy may have another coordinator by now
            return
        with self._lock:
            if self._known.get(id(self._strategy)) is self:
                del self._known[id(self._strategy)]
        extended = self._strategy.extended
        with contextlib.suppress(ValueError):  # it was closed before
            extended.when_closed.remove(self.close)
            extended.home.when_freed.remove(self._dispatcher.drop_variable)
        if self._reports is not None:
            self._reports.close()
        self._dispatcher.close()
        extended.next_closure = self._dispatcher.machine.next_closure
        self._is_over = True  # not before, so that who was interrupted can close it again

    def _serve_reports(self) -> ReportEndpoint | None:
        """Let `phalanx explain` ask, at the address of the chief, if this is it."""
        resolver = self._strategy.cluster_resolver
        if resolver.task_type != "chief" or resolver.task_id is None:
            return None
        address = resolver.cluster_spec().task_address("chief", resolver.task_id)
        return ReportEndpoint(address, self._session.key, self.report)

    def __repr__(self) -> str:
        return f"<px.coordinator.ClusterCoordinator of {self._strategy!r}>"

    # -- waiting ---------------------------------------------------------------------------------

    def _ask(self, answer: Callable[[], Any]) -> Any:
        """Call something in the coordinator's thread."""
        return self._wait_for(self._dispatcher.questions.ask(lambda: (answer(),)), "the coordinator")

    def _wait_for_value(self, value: RemoteValue, bell: Any) -> None:
        watch = _Watch(self._dispatcher)
        while not bell.wait(_LOOK_EVERY):
            self._check_workers("the value of a function")
            watch.look("the value of a function")

    def _wait_for(self, question: Question, what: str) -> Any:
        """Wait for an answer; raises if no worker is there that could bring it about."""
        watch = _Watch(self._dispatcher)
        try:
            while not question.bell.wait(_LOOK_EVERY):
                self._check_workers(what)
                watch.look(what)
        except BaseException:
            question.is_dropped = True
            raise
        if question.failure is not None:
            raise question.failure
        assert question.result is not None
        return question.result[0]

    def _check_workers(self, what: str) -> None:
        """Raise if all workers have been missing for too long."""
        links = self._dispatcher.links
        since = [link.missing_since for link in links]
        if any(moment is None for moment in since):
            return
        seconds = time.monotonic() - max(moment for moment in since if moment is not None)
        limit = self._session.options.worker_timeout
        if seconds >= limit:
            missing = "; ".join(f"{link}: {link.reason}" for link in links)
            raise DeadlineExceededError(
                f"No worker was there for {seconds:.0f} seconds, so waiting for {what} is in vain. "
                f"Start the workers, or give them more time by worker_timeout. Received: {missing}"
            )

    @staticmethod
    def _raise(answer: Any) -> None:
        if isinstance(answer, BaseException):
            raise answer


_LOOK_EVERY = 0.5  # seconds between looks at the workers
_QUIET = 60.0  # seconds without the end of a function, after which a wait says what it waits for


class _Watch:
    """Says from time to time what a wait is for, if no function ends."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._done, self._since = dispatcher.machine.done_count, time.monotonic()

    def look(self, what: str) -> None:
        """Look whether anything has happened."""
        done, now = self._dispatcher.machine.done_count, time.monotonic()
        if done != self._done:
            self._done, self._since = done, now
        elif now - self._since > _QUIET:
            self._since = now
            doing = "; ".join(link.describe() for link in self._dispatcher.links)
            _log.warning("Waiting for %s; no function has ended for %.0f s. %s", what, _QUIET, doing)


def coordinator_of(strategy: Strategy) -> ClusterCoordinator | None:
    """The coordinator of a strategy, if it has been made."""
    return ClusterCoordinator._known.get(id(strategy))
