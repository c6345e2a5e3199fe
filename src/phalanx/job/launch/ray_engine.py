"""Ray as the engine of a job: it places the processes of the tasks, and the launcher runs them.

Each task has an actor, and the actor holds a process with the program. Messages between tasks go over
their own connections, not through Ray. Ray restarts nothing: the launcher decides who is started again,
as everywhere else, and takes a new actor where the old one is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.cluster.resolvers.ray import NAMESPACE, ray_module
from phalanx.errors import InvalidValueError, ResourceExhaustedError, UnavailableError
from phalanx.job.hub.descriptions import Task
from phalanx.job.launch.process_group import Command
from phalanx.job.launch.ray_task import remote_class
from phalanx.job.launch.task_environment import with_addresses
from phalanx.job.launch.worker_process import Guard
from phalanx.net.addresses import join_address
from phalanx.runtime.formatting import shown

_LOOPBACK = "127.0.0.1"
_READ = 5.0  # seconds that an actor waits for output before it says that there is none
_ANSWER = 60.0  # seconds within which an actor answers
_LOST = 20.0  # seconds for an actor that cannot be reached to come back


@dataclass(frozen=True)
class RayOptions:
    """How tasks are placed on a Ray cluster.

    Args:
        address: of the Ray cluster; None takes RAY_ADDRESS, or starts a Ray on this machine.
        resources: what a task of each job needs, such as ``{"worker": {"CPU": 4, "GPU": 1}}``; by
            default one CPU.
        strategy: how Ray spreads the tasks over nodes: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        timeout: seconds within which there must be room for all tasks.
    """

    address: str | None = None
    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    strategy: str = "PACK"
    timeout: float = 60.0

    def bundle(self, task: Task) -> dict[str, float]:
        """What one task needs."""
        return {"CPU": 1.0, **self.resources.get(task.type, {})}


def parse_resources(words: Sequence[str]) -> dict[str, dict[str, float]]:
    """Resources as ``type:NAME=NUMBER``, with commas between several.

    >>> parse_resources(["worker:GPU=1,CPU=4", "ps:memory=1e9"])
    {'worker': {'GPU': 1.0, 'CPU': 4.0}, 'ps': {'memory': 1000000000.0}}
    """
    result: dict[str, dict[str, float]] = {}
    for word in words:
        job, _, needs = word.partition(":")
        try:
            pairs = [need.split("=") for need in needs.split(",")]
            amounts = {name: float(number) for name, number in pairs if name}
            if not job or len(amounts) != len(pairs) or min(amounts.values()) < 0:
                raise ValueError
        except ValueError:
            raise InvalidValueError(
                "Resources are written as the type of a task and what it needs, such as "
                f"worker:GPU=1,CPU=4. Received: {shown(word)}"
            ) from None
        result.setdefault(job, {}).update(amounts)
    return result


class RayCluster:
    """Actors for the tasks of a job, as a context manager."""

    def __init__(self, tasks: Sequence[Task], options: RayOptions) -> None:
        self._options, self._wanted = options, list(tasks)
        self._ray = ray_module()
        self._class = remote_class(self._ray)
        self._actors: list[Any] = []
        self._group: Any = None
        self._has_begun = False
        self.host = _LOOPBACK
        """The address of this machine that all tasks reach."""
        self.tasks: list[Task] = []
        """The tasks with their addresses."""

    def __enter__(self) -> RayCluster:
        try:
            self._connect()
            self._reserve()
            self._actors = [self._actor(index) for index in range(len(self._wanted))]
            places = self._get([a.place.remote() for a in self._actors])
            own = self._ray.get_runtime_context().get_node_id()
            is_local = all(node == own for node, _, _ in places)
            if not is_local:
                self.host = str(self._ray.util.get_node_ip_address())
            self._nodes = [node for node, _, _ in places]
            addresses = [
                join_address(_LOOPBACK if is_local else host, port) for _, host, port in places
            ]
            self.tasks = with_addresses(self._wanted, addresses)
        except self._ray.exceptions.RayActorError as error:
            self.close()
            raise UnavailableError(
                f"An actor of Ray has ended before it began. Received: {error}"
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def spawn(self, index: int, command: Command, guard: Guard) -> RayProcess:
        """Start the process of a task in its actor, or in a new one if that is gone."""
        actor = self._actors[index]
        order = (command.name, list(command.argv), dict(command.environ), command.cwd or os.getcwd())
        try:
            self._get(actor.start.remote(*order))
        except self._ray.exceptions.RayActorError:
            actor = self._actors[index] = self._actor(index)
            node, _, _ = self._get(actor.place.remote())
            if node != self._nodes[index]:
                raise UnavailableError(
                    f"The Ray node of {command.name} is gone, and the other tasks know its address "
                    f"only. Start the job again. Received: node {node}"
                ) from None
            self._get(actor.start.remote(*order))
        return RayProcess(self._ray, actor, command.name)

    def close(self) -> None:
        """End the actors, and give back what they took."""
        ray = self._ray
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.get(actor.end.remote(), timeout=_READ)
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
            self._group = None
        if self._has_begun:
            self._has_begun = False
            ray.shutdown()

    def _get(self, references: Any) -> Any:
        """The answers of actors. Those that are gone raise Ray's own error."""
        problems = self._ray.exceptions
        try:
            return self._ray.get(references, timeout=_ANSWER)
        except problems.RayActorError:
            raise
        except problems.RayError as error:
            raise UnavailableError(
                "An actor of Ray could not do its work. The same Phalanx must be installed on all "
                f"nodes. Received: {error}"
            ) from error

    def _connect(self) -> None:
        ray, options = self._ray, self._options
        if ray.is_initialized():
            return
        arguments: dict[str, Any] = {}
        if options.address is None and not os.environ.get("RAY_ADDRESS"):
            needed = sum(options.bundle(task)["CPU"] for task in self._wanted)
            # On one machine the tasks share the processors, as without Ray.
            arguments["num_cpus"] = max(os.cpu_count() or 1, int(needed + 1))
            arguments["include_dashboard"] = False
        try:
            ray.init(
                options.address,
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
                **arguments,
            )
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            raise UnavailableError(
                f"There is no connection to Ray: {error}. Received: {shown(options.address)}"
            ) from error
        self._has_begun = True

    def _reserve(self) -> None:
        """Take the room for all tasks at once, so that no job has half of what it needs."""
        bundles = [self._options.bundle(task) for task in self._wanted]
        util = self._ray.util
        self._group = util.placement_group(bundles, strategy=self._options.strategy)
        if not self._group.wait(self._options.timeout):
            needs = {str(task): bundle for task, bundle in zip(self._wanted, bundles, strict=True)}
            raise ResourceExhaustedError(
                f"Ray has no room for the job within {self._options.timeout:g} seconds: it has "
                f"{self._ray.available_resources()} left. Ask for less with --ray-resources. "
                f"Received: {shown(needs)}"
            )

    def _actor(self, index: int) -> Any:
        bundle = dict(self._options.bundle(self._wanted[index]))
        strategies = self._ray.util.scheduling_strategies
        return self._class.options(
            num_cpus=bundle.pop("CPU", 0),
            num_gpus=bundle.pop("GPU", 0),
            memory=bundle.pop("memory", None),
            resources=bundle,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
        ).remote()


class RayProcess:
    """The process of a task, in an actor; to be used as a process of this machine is.

    A thread asks the actor for what the process prints, and writes it to pipes.
    """

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self._ray, self._actor, self._name = ray, actor, name
        self.stdout, self._out = os.pipe()
        self.stderr, self._err = os.pipe()
        self.exit_fd, self._exit = os.pipe()
        for fd in (self.stdout, self.stderr, self.exit_fd):
            os.set_blocking(fd, False)
        self.code: int | None = None
        self._closing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"phalanx-ray-{name}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> int | None:
        """The exit code, if the process ends within this time."""
        self._ended.wait(seconds)
        return self.code

    def send(self, signum: int) -> None:
        """Send a signal to the process and its children."""
        with contextlib.suppress(Exception):
            self._actor.send.remote(int(signum))

    def write(self, data: bytes) -> None:
        """There is no input."""

    def close(self) -> int | None:
        """Kill what is left of the process; the actor stays."""
        self._closing = True
        with contextlib.suppress(Exception):
            self._actor.end.remote()
        self._thread.join(_ANSWER)
        for fd in (self.stdout, self.stderr, self.exit_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        return self.code

    def _follow(self) -> None:
        try:
            code = self._pass_on()
        except BrokenPipeError:  # the launcher does not read any more
            code = -int(signal.SIGKILL)
        self.code = code
        self._ended.set()
        for fd in (self._out, self._err, self._exit):
            os.close(fd)

    def _pass_on(self) -> int:
        """Pass on what the process prints until it ends; returns its exit code."""
        lost: float | None = None
        while True:
            try:
                printed, code = self._ray.get(self._actor.read.remote(_READ), timeout=_ANSWER)
            except self._ray.exceptions.ActorUnavailableError as error:
                lost = lost or time.monotonic()
                if self._closing or time.monotonic() - lost > _LOST:
                    return self._gone(error)
                continue
            except Exception as error:  # noqa: BLE001 - whatever Ray raises: the actor is gone
                return self._gone(error)
            lost = None
            for is_error, data in printed:
                _write(self._err if is_error else self._out, data)
            if code is not None:
                return int(code)

    def _gone(self, error: Exception) -> int:
        if not self._closing:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            _write(self._err, f"The Ray actor of {self._name} is gone: {first}\n".encode())
        return -int(signal.SIGKILL)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
