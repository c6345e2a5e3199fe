"""A cluster of real processes for tests."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidValueError,
    WorkerLostError,
)
from phalanx.job.hub.descriptions import Task
from phalanx.job.hub.server import Hub
from phalanx.job.launch.launcher import members
from phalanx.job.launch.ports import PortReservation
from phalanx.job.launch.task_environment import job_tasks, task_environment, tf_config, with_addresses
from phalanx.runtime.formatting import shown
from phalanx.runtime.shipping import pack_call
from phalanx.testing.copies import find_template
from phalanx.testing.pool import Pool, Worker
from phalanx.testing.runs import MultiProcessRun, Reply

__all__ = ["MultiProcess"]

_START_SECONDS = 60.0
_DEATH_SECONDS = 0.3
_STACK_SECONDS, _QUIET_SECONDS = 2.0, 0.2


class MultiProcess:
    """A cluster of real processes on this machine, for tests of code that runs on several workers.

    Each process has its own logical CPU devices and the TF_CONFIG of a real cluster. They run the
    functions that you send: lambdas, closures and functions of the test's own module, with what they
    use of it. Results of any size come back. Workers import other modules themselves.

    A worker starts in a tenth of a second, and pays for importing JAX when a function first uses it,
    so let tests share a cluster. If a worker died, or the hub knows of a failure, the next run starts
    a new cluster.

    Args:
        workers: the number of workers.
        devices: the number of logical CPU devices of each process.
        ps: the number of parameter servers, which come after the workers.
        chief: whether there is a chief, which comes before the workers.
        reuse: whether one process runs several functions, one after another; else each run has new
            ones.
        env: environment variables for all processes.
        preload: names of modules that the workers have already imported when they start. They are
            imported once, in a process of which the workers are copies (where the system can do that),
            so that clusters with JAX start in a tenth of a second too. With the same modules and the
            same environment, later clusters use the same process.

    Examples:
        >>> import os
        >>> import phalanx as px
        >>> factor = 10
        >>> with px.testing.MultiProcess(workers=2, devices=1) as cluster:
        ...     print(cluster.run(lambda x: x * factor, 4))
        ...     print(len(set(cluster.run(os.getpid))))
        [40, 40]
        2
    """

    def __init__(
        self,
        workers: int = 2,
        devices: int = 1,
        *,
        ps: int = 0,
        chief: bool = False,
        reuse: bool = True,
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        if not isinstance(devices, int) or devices < 1:
            raise InvalidValueError(
                f"devices must be a whole number from 1. Received: {shown(devices)}"
            )
        self._tasks = job_tasks(workers, ps, chief)
        self.names = [str(task) for task in self._tasks]
        self._devices = devices
        self._reuse = reuse
        self._env = dict(env or {})
        self._preload = _module_names(preload)
        self._numbers = itertools.count(1)
        self._stack = contextlib.ExitStack()
        self._pool: Pool | None = None
        self._hub: Hub | None = None
        self._environs: list[dict[str, str]] = []
        self._earlier = [(b"", b"") for _ in self._tasks]
        self._run: MultiProcessRun | None = None
        self._begun: dict[int, tuple[int, int]] = {}
        self._closing = False

    def __enter__(self) -> MultiProcess:
        self._open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- running ---------------------------------------------------------------------------------

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Run a function on all workers and return what each returned.

        The first failure is raised: `px.errors.WorkerFailedError` with the worker's traceback if the
        function raised (its exception is the `__cause__`), `px.errors.WorkerLostError` if the process
        died, `px.errors.DeadlineExceededError` with the stacks of the late workers. Workers that still
        run the function are then killed.
        """
        handle = self.start(fn, *args, **kwargs)
        try:
            return handle.result(timeout)
        finally:
            if not handle.done:
                self._open_pool().end(range(len(self._tasks)), graceful=False)

    def start(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> MultiProcessRun:
        """Let all workers run a function, and return at once."""
        call = pack_call(fn, args, kwargs)
        self._open_pool()
        if self._run is not None and not self._run.done:
            raise FailedPreconditionError(
                "The workers still run another function. Wait for its results first. "
                f"Received: {shown(fn)}"
            )
        if self._is_spent():
            self._stack.close()
            self._open()
        self._run = MultiProcessRun(self, next(self._numbers), call)
        for worker in range(len(self._tasks)):
            self._send(self._run, worker)
        return self._run

    # -- faults ----------------------------------------------------------------------------------

    def kill(self, worker: int) -> None:
        """Kill a worker and its children (SIGKILL), and wait until it is dead."""
        self._process(worker)
        self._open_pool().end([worker], graceful=False)

    def stop(self, worker: int) -> None:
        """Freeze a worker (SIGSTOP): it stays there, but does nothing."""
        self._process(worker).process.send(signal.SIGSTOP)

    def cont(self, worker: int) -> None:
        """Let a frozen worker continue (SIGCONT)."""
        self._process(worker).process.send(signal.SIGCONT)

    def restart(self, worker: int) -> None:
        """Replace a worker by a new process, as a cluster manager does.

        If a function is running, or has ended because this worker died, the new process runs it again
        from the start.
        """
        pool = self._open_pool()
        self.kill(worker)
        with pool.changed:
            self._remember(pool.workers[worker])
            pool.start(worker, self._environs[worker])
            run = self._run
            reply = None if run is None else run.replies.get(worker)
            again = run is not None and (not run.done or (reply is not None and reply.kind == "death"))
            if run is not None and again:
                run.replies.pop(worker, None)
        self._wait_ready()
        if run is not None and again:
            self._send(run, worker)

    # -- questions -------------------------------------------------------------------------------

    @property
    def hub(self) -> Hub:
        """The hub of the cluster, which runs in this process as it does in a launcher."""
        self._open_pool()
        assert self._hub is not None
        return self._hub

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [worker.process.pid for _, worker in sorted(self._open_pool().workers.items())]

    def alive(self, worker: int) -> bool:
        """Whether a worker's process is there."""
        return self._process(worker).code is None

    def stdout(self, worker: int) -> str:
        """What a worker has printed so far."""
        return self._texts(worker)[0].decode("utf-8", "replace")

    def stderr(self, worker: int) -> str:
        """What a worker has written to its standard error so far."""
        return self._texts(worker)[1].decode("utf-8", "replace")

    def wait_for_output(self, worker: int, text: str, timeout: float = 60.0) -> None:
        """Wait until a worker has printed a text, to act when it has come to that point."""
        self._process(worker)
        self.wait(lambda: text in self.stdout(worker) or not self.alive(worker), timeout)
        if text not in self.stdout(worker):
            instead = f"has not within {timeout:g} seconds" if self.alive(worker) else "died"
            raise DeadlineExceededError(
                f"{self.names[worker]} should print {text!r}, but {instead}. It printed: "
                f"{self.stdout(worker)!r}, and to its standard error: {self.stderr(worker)!r}"
            )

    def stacks(self, workers: list[int]) -> dict[int, str]:
        """The Python stacks of all threads of workers, also of those that are stuck in native code."""
        begun = {worker: len(self._texts(worker)[1]) for worker in workers if self.alive(worker)}
        for worker in begun:
            os.kill(self._process(worker).process.pid, signal.SIGUSR1)

        def new(worker: int) -> str:
            return self._texts(worker)[1][begun[worker] :].decode("utf-8", "replace")

        def more(than: int) -> bool:
            return sum(len(new(worker)) for worker in begun) > than

        self.wait(lambda: all("most recent call first" in new(i) for i in begun), _STACK_SECONDS)
        seen = 0
        while more(seen):  # until all threads are written
            seen = sum(len(new(worker)) for worker in begun)
            self.wait(functools.partial(more, seen), _QUIET_SECONDS)
        silent = "It does not answer: it is frozen."
        return {i: (new(i).strip() or silent) if i in begun else "It is dead." for i in workers}

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until something is so that workers change; returns whether it is."""
        if self._pool is None:
            return condition()
        return self._pool.wait(condition, time.monotonic() + timeout)

    def close(self) -> None:
        """End all processes; those that wait for work end by themselves, the others are killed."""
        self._stack.close()
        self._run = None

    # -- inside ----------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._pool is not None:
            return
        with contextlib.ExitStack() as stack:
            ports = stack.enter_context(PortReservation(len(self._tasks))).ports
            self._tasks = with_addresses(self._tasks, [f"127.0.0.1:{port}" for port in ports])
            token = secrets.token_hex(16)
            self._hub = Hub(members(self._tasks), token, cause_of_death=self._cause_of_death)
            stack.enter_context(self._hub)
            self._environs = [
                task_environment(
                    os.environ | self._env,
                    config=tf_config(self._tasks, task),
                    hub=self._hub.address,
                    token=token,
                    devices=self._devices,
                )
                for task in self._tasks
            ]
            self._run, self._closing = None, False
            template = find_template(self._preload, self._environs[0])
            self._pool = Pool(self._take_reply, self._take_death, template)
            stack.callback(self._end_pool, self._pool)
            for i, environ in enumerate(self._environs):
                self._pool.start(i, environ)
            self._wait_ready()
            self._stack = stack.pop_all()

    def _end_pool(self, pool: Pool) -> None:
        self._closing = True
        if self._run is None or self._run.done:
            pool.end(range(len(self._tasks)), graceful=True)
        pool.close()
        for worker in pool.workers.values():
            self._remember(worker)
        self._pool = None

    def _open_pool(self) -> Pool:
        if self._pool is None:
            raise FailedPreconditionError(
                "The cluster is not open. Use it as: with px.testing.MultiProcess(2) as cluster: ..."
            )
        return self._pool

    def _process(self, worker: int) -> Worker:
        workers = self._open_pool().workers
        if worker not in workers:
            raise InvalidValueError(
                f"worker must be an index from 0 to {len(self._tasks) - 1}. Received: {shown(worker)}"
            )
        return workers[worker]

    def _is_spent(self) -> bool:
        dead = any(worker.code is not None for worker in self._open_pool().workers.values())
        return dead or self.hub.failure is not None or (self._run is not None and not self._reuse)

    def _send(self, run: MultiProcessRun, worker: int) -> None:
        pool = self._open_pool()
        with pool.changed:
            out, err = self._texts(worker)
            self._begun[worker] = (len(out), len(err))
            if pool.workers[worker].code is None:
                pool.send(worker, (run.number, run.call))
            else:
                self._take_death(worker, pool.workers[worker].code or 0)

    def _wait_ready(self) -> None:
        workers = self._open_pool().workers
        self.wait(lambda: all(w.ready or w.code is not None for w in workers.values()), _START_SECONDS)
        for i, worker in sorted(workers.items()):
            if not worker.ready and worker.code is None:
                raise WorkerLostError(
                    f"{self.names[i]} does not start within {_START_SECONDS:g} seconds. It wrote: "
                    f"{self.stderr(i)}"
                )
            if not worker.ready:
                raise WorkerLostError(f"{self.names[i]} died at its start: {self.stderr(i)}")

    def _texts(self, worker: int) -> tuple[bytes, bytes]:
        if not 0 <= worker < len(self._tasks):
            self._process(worker)
        out, err = self._earlier[worker]
        if self._pool is None or worker not in self._pool.workers:
            return out, err
        now = self._pool.workers[worker]
        return out + now.stdout, err + now.stderr

    def _remember(self, worker: Worker) -> None:
        out, err = self._earlier[worker.index]
        self._earlier[worker.index] = (out + worker.stdout, err + worker.stderr)

    # -- what workers do; called by the pool's thread ---------------------------------------------

    def _take_reply(self, worker: int, message: Any) -> None:
        kind, number, content = message
        if kind == "ready":
            self._open_pool().workers[worker].ready = True
        elif self._run is not None and number == self._run.number:
            self._record(self._run, worker, kind, content)

    def _take_death(self, worker: int, code: int) -> None:
        run = self._run
        if run is not None and worker in self._begun and worker not in run.replies:
            self._record(run, worker, "death", code)
        task = self._tasks[worker]
        if not self._closing and task in members(self._tasks):
            self.hub.exited(task, code)

    def _record(self, run: MultiProcessRun, worker: int, kind: str, content: Any) -> None:
        out, err = self._texts(worker)
        from_out, from_err = self._begun[worker]
        run.replies[worker] = Reply(kind, content, out[from_out:], err[from_err:], time.monotonic())

    def _cause_of_death(self, task: Task) -> int | None:
        worker = None if self._pool is None else self._pool.workers.get(self._tasks.index(task))
        return None if worker is None else worker.process.wait(_DEATH_SECONDS)


def _module_names(preload: Sequence[str]) -> tuple[str, ...]:
    names = (preload,) if isinstance(preload, str) else tuple(preload)
    if not all(isinstance(name, str) and name for name in names):
        raise InvalidValueError(f"preload must be names of modules. Received: {shown(preload)}")
    return names
