"""What can be known to be wrong with a cluster before its processes meet: names, addresses, ports."""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.roles import id_in_cluster, validate_cluster_spec
from phalanx.cluster.spec import ClusterSpec
from phalanx.errors import ClusterEnvironmentError, DuplicateTaskError, InvalidValueError
from phalanx.job.hub.descriptions import Task
from phalanx.net.addresses import split_address
from phalanx.runtime.formatting import shown

_ANY = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class Membership:
    """Where this process stands: the tasks that train together, by rank, and which of them it is.

    `cluster` is the description of the whole cluster as text, for comparing.
    """

    tasks: tuple[Task, ...]
    rank: int
    cluster: str

    @property
    def task(self) -> Task:
        """The task of this process."""
        return self.tasks[self.rank]

    @property
    def is_local(self) -> bool:
        """Whether all tasks have addresses that are only reachable on one machine."""
        return all(is_loopback(split_address(task.address)[0]) for task in self.tasks)


def training_tasks(cluster: ClusterSpec) -> tuple[Task, ...]:
    """The tasks that train together, in the order of their ranks: the chief, and the workers.

    >>> spec = ClusterSpec({"worker": ["host0:2222"], "ps": ["host1:2222"], "chief": ["host2:2222"]})
    >>> [str(task) for task in training_tasks(spec)]
    ['chief 0', 'worker 0']
    """
    return tuple(
        Task(job, index, cluster.task_address(job, index))
        for job in ("chief", "worker")
        if job in cluster.jobs
        for index in cluster.task_indices(job)
    )


def find_membership(resolver: ClusterResolver) -> Membership:
    """Ask a resolver for the cluster and the task of this process, and check both."""
    cluster, task_type, task_id = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    if task_type is None or task_id is None:
        raise InvalidValueError(
            "The resolver must know which task this process is. Give task_type and task_id, or the key "
            f"'task' in TF_CONFIG. Received: task_type={shown(task_type)}, task_id={shown(task_id)}"
        )
    validate_cluster_spec(cluster, task_type, task_id)
    if task_type not in ("chief", "worker"):
        raise InvalidValueError(
            "Only tasks of type 'chief' and 'worker' train together over several processes. "
            f"Received: task_type={shown(task_type)}"
        )
    tasks = training_tasks(cluster)
    check_addresses(tasks)
    text = json.dumps({job: cluster.job_tasks(job) for job in sorted(cluster.jobs)})
    return Membership(tasks, id_in_cluster(cluster, task_type, task_id), text)


def check_addresses(tasks: Sequence[Task]) -> None:
    """Check what addresses look like: each once, and none that means another machine on each machine.

    >>> check_addresses([Task("worker", 0, "localhost:2222"), Task("worker", 1, "localhost:2223")])
    >>> check_addresses([Task("worker", 0, "localhost:2222"), Task("worker", 1, "host1:2222")])
    Traceback (most recent call last):
    phalanx.errors.ClusterEnvironmentError: ...
    """
    hosts = {task: split_address(task.address)[0] for task in tasks}
    repeated = [at for at, count in Counter(task.address for task in tasks).items() if count > 1]
    if repeated:
        sharing = ", ".join(str(task) for task in tasks if task.address == repeated[0])
        raise DuplicateTaskError(
            f"Each task needs an address of its own, but {sharing} have the same. "
            f"Received: {shown(repeated[0])}"
        )
    local = [task for task in tasks if is_loopback(hosts[task])]
    if local and len(local) < len(tasks):
        there = ", ".join(f"{task} at {task.address}" for task in local)
        other = next(task for task in tasks if task not in local)
        raise ClusterEnvironmentError(
            f"The cluster has several machines ({other} is at {other.address}), but an address like "
            "'localhost' means another machine on each of them. Write a name or address that all "
            f"machines know. Received: {there}"
        )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself, by its looks; names are not looked up.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("host0")
    (True, True, False)
    """
    if host.lower() in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve(host: str) -> list[str]:
    """The addresses behind a name; a name that is not known is a `ClusterEnvironmentError`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ClusterEnvironmentError(
            f"The name of a machine is not known here: {error.strerror or error}. Check the spelling, "
            f"and that the name server has it. Received: {shown(host)}"
        ) from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def port_problem(task: Task, bind: str | None = None) -> str | None:
    """What keeps a process on this machine from listening at the address of its task, or None.

    `bind` is the address to listen at instead of the task's, such as 0.0.0.0.
    """
    host, port = split_address(task.address)
    try:
        family, *_, address = socket.getaddrinfo(bind or host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        return f"The name in {task.address}, the address of {task}, is not known ({error.strerror})."
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"Port {port} of {task} ({task.address}) is in use by another process on "
                f"{socket.gethostname()}. End it (is it a worker of an older run?), or give {task} "
                "another port."
            )
        if error.errno == errno.EADDRNOTAVAIL:
            return (
                f"{task.address}, the address of {task}, does not belong to this machine, "
                f"{socket.gethostname()}. Start {task} where its address is, or correct the address; "
                "behind a gateway, set PHALANX_BIND to the address to listen at, such as 0.0.0.0."
            )
        return f"{task} cannot listen at its address {task.address}: {error.strerror}."
    return None


def bind_host(task: Task, is_local: bool, bind: str | None = None) -> str:
    """The address to listen at for a task, so that the other machines reach it.

    A machine's own name often stands for a loopback address on that machine; then only listening
    everywhere helps.
    """
    if bind:
        return bind
    host = split_address(task.address)[0]
    addresses = resolve(host)
    if not is_local and all(is_loopback(address) for address in addresses):
        return "0.0.0.0"
    return addresses[0]
