"""The tasks of a Slurm job step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from typing import Any

from phalanx.cluster.resolvers.base import FoundTasksResolver
from phalanx.cluster.resolvers.environment import number_variable, variable
from phalanx.cluster.resolvers.hostlist import (
    MOST_TASKS,
    deal_tasks,
    expand_hostlist,
    expand_tasks_per_node,
)
from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.tasks import port, task_index
from phalanx.errors import ClusterEnvironmentError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

_HINT = "Slurm sets it for the tasks of a job step: start the program with `srun`."
_NVIDIA_SMI_SECONDS = 30
_MOST_GPUS = 4096


class SlurmClusterResolver(FoundTasksResolver):
    """Describes the tasks of the Slurm job step that this process belongs to.

    Rank and hosts come from SLURM_PROCID, SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE and
    SLURM_STEP_NUM_TASKS, which `srun` sets; arguments replace them. They are read when the resolver is
    made. Tasks are numbered as Slurm numbers them, also with `srun --distribution=cyclic` or `plane`.
    Tasks on the same host get successive ports.

    >>> import os
    >>> from unittest import mock
    >>> step = dict(
    ...     SLURM_PROCID="2",
    ...     SLURM_STEP_NUM_TASKS="3",
    ...     SLURM_STEP_NODELIST="n[1-2]",
    ...     SLURM_STEP_TASKS_PER_NODE="2,1",
    ... )
    >>> with mock.patch.dict(os.environ, step):
    ...     resolver = SlurmClusterResolver(gpus_per_node=0)
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['n1:8888', 'n1:8889', 'n2:8888']})
    >>> resolver.get_task_info(), resolver.master()
    (('worker', 2), 'grpc://n2:8888')

    Args:
        jobs: the number of tasks of each job; by default all are workers. Jobs take the tasks in the
            order of their names. Tasks that are left over belong to no job.
        port_base: the port of the first task on each host.
        gpus_per_node: the number of GPUs of each host; by default what Slurm or CUDA_VISIBLE_DEVICES
            says, or else `nvidia-smi`. May be 0.
        gpus_per_task: the number of GPUs of each task; by default equal shares.
        tasks_per_node: the number of tasks on each host, as a number or a dict by host in the order of
            the ranks.
        auto_set_gpu: sets CUDA_VISIBLE_DEVICES to the GPUs of this task, unless Slurm has done so.
            Make the resolver before JAX starts.
        rpc_layer: the protocol between tasks.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        rank = number_variable("SLURM_PROCID", _HINT)
        counts = _tasks_by_host(tasks_per_node)
        hosts = _hosts_by_rank(counts)
        if rank >= len(hosts) and tasks_per_node is None:
            raise ClusterEnvironmentError(
                f"SLURM_PROCID must be less than the number of tasks, {len(hosts)}. Received: {rank}"
            )
        own_host = hosts[rank] if rank < len(hosts) else None
        _check_host(rank, own_host, hosts)

        if jobs is None:
            jobs = {"worker": _number_of_tasks(default=len(hosts))}
        _check_counts("jobs", jobs, example={"ps": 1, "worker": 4})
        if sum(jobs.values()) > len(hosts):
            raise ClusterEnvironmentError(
                f"The jobs need more tasks than Slurm has started: {len(hosts)}. Ask for more with "
                f"`srun --ntasks`, or make the jobs smaller. Received: jobs={shown(dict(jobs))}"
            )
        spec, task_type, task_id = _divide_into_jobs(jobs, _addresses(hosts, port_base), rank)
        self._cluster_spec = ClusterSpec(spec)
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer

        gpus = _Gpus(gpus_per_node, gpus_per_task, max(counts.values()))
        self._gpus_per_task = gpus.per_task
        if auto_set_gpu and own_host is not None:
            gpus.show_to_this_process(local_id=hosts[:rank].count(own_host))

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the job step, by job."""
        return self._cluster_spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns `task_type` and `task_id`; both are None for a task that belongs to no job."""
        return self.task_type, self.task_id

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Returns the number of GPUs of each task."""
        return {"GPU": self._gpus_per_task}


# -- tasks ---------------------------------------------------------------------------------------


def _tasks_by_host(tasks_per_node: object) -> dict[str, int]:
    if isinstance(tasks_per_node, Mapping):
        counts = dict(tasks_per_node)
    else:
        hosts = expand_hostlist(variable("SLURM_STEP_NODELIST", _HINT))
        if tasks_per_node is None:
            numbers = expand_tasks_per_node(variable("SLURM_STEP_TASKS_PER_NODE", _HINT))
        else:
            numbers = [task_index(tasks_per_node, "`tasks_per_node`")] * len(hosts)
        if len(numbers) != len(hosts) or len(set(hosts)) < len(hosts):
            raise ClusterEnvironmentError(
                "SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE must give one number for each host, "
                f"and each host once. Received: hosts {shown(hosts)}, tasks {shown(numbers)}"
            )
        counts = dict(zip(hosts, numbers, strict=True))
    _check_counts("tasks_per_node", counts, example={"n1": 2, "n2": 1})
    return counts


def _check_counts(name: str, counts: object, example: dict[str, int]) -> None:
    if (
        not isinstance(counts, Mapping)
        or not counts
        or not all(isinstance(k, str) and isinstance(n, int) and n >= 0 for k, n in counts.items())
        or sum(counts.values()) > MOST_TASKS
    ):
        raise InvalidValueError(
            f"`{name}` must be a dict of numbers of tasks, at most {MOST_TASKS:,} together, for "
            f"example {example}. Received: {shown(counts)}"
        )


def _number_of_tasks(default: int) -> int:
    name = "SLURM_STEP_NUM_TASKS"
    return number_variable(name, _HINT) if name in os.environ else default


def _hosts_by_rank(counts: Mapping[str, int]) -> list[str]:
    distribution = re.split(r"[:,=]", os.environ.get("SLURM_DISTRIBUTION", "block"))[0]
    if distribution == "cyclic":
        at_once = 1
    elif distribution == "plane":
        at_once = number_variable("SLURM_DIST_PLANESIZE", "Slurm sets it with `--distribution=plane`.")
    else:
        at_once = max(counts.values())
    names = list(counts)
    return [names[node] for node in deal_tasks(list(counts.values()), max(at_once, 1))]


def _check_host(rank: int, expected: str | None, hosts: list[str]) -> None:
    """Slurm tells each task where it is: a wrong table would let the tasks wait for each other."""
    here = os.environ.get("SLURMD_NODENAME")
    if expected is not None and here in hosts and here != expected:
        raise ClusterEnvironmentError(
            f"Rank {rank} should be on host {shown(expected)}, but runs on {shown(here)}, so the "
            "ranks of the other tasks are not known either. Start the program with "
            "`srun --distribution=block`. "
            f"Received: SLURM_DISTRIBUTION={shown(os.environ.get('SLURM_DISTRIBUTION'))}"
        )


def _addresses(hosts: list[str], port_base: int) -> list[str]:
    if not isinstance(port_base, int):
        raise InvalidTypeError(
            f"`port_base` must be a number, such as 8888. Received: {shown(port_base)}"
        )
    port(port_base, "`port_base`")
    seen: Counter[str] = Counter()
    addresses = []
    for host in hosts:
        addresses.append(f"{host}:{port_base + seen[host]}")
        seen[host] += 1
    return addresses


def _divide_into_jobs(
    jobs: Mapping[str, int], addresses: list[str], rank: int
) -> tuple[dict[str, list[str]], str | None, int | None]:
    """The addresses of each job, and the job and index of a rank."""
    spec: dict[str, list[str]] = {}
    own: tuple[str | None, int | None] = (None, None)
    start = 0
    for name, count in sorted(jobs.items()):
        spec[name] = addresses[start : start + count]
        if start <= rank < start + count:
            own = (name, rank - start)
        start += count
    return spec, *own


# -- GPUs ----------------------------------------------------------------------------------------


class _Gpus:
    """How many GPUs each task has, and which of them are this one's."""

    def __init__(self, per_node: int | None, per_task: int | None, tasks_on_node: int) -> None:
        self._visible = _visible_gpus()
        per_node = None if per_node is None else task_index(per_node, "`gpus_per_node`")
        per_task = None if per_task is None else task_index(per_task, "`gpus_per_task`")
        given = per_node is not None
        if per_node is None:
            per_node = self._count()
        # Fewer than the node has: Slurm has given this task its share already.
        self._is_share = not given and self._visible is not None and len(self._visible) < per_node
        if per_task is None:
            per_task = (
                len(self._visible or ())
                if self._is_share
                else _count_of("SLURM_GPUS_PER_TASK") or per_node // max(tasks_on_node, 1)
            )
        if not self._is_share and per_task * tasks_on_node > per_node:
            raise ClusterEnvironmentError(
                "The tasks of a node need more GPUs than it has. Make `gpus_per_task` smaller or "
                "`gpus_per_node` larger, or start fewer tasks per node. Received: "
                f"gpus_per_task={per_task}, gpus_per_node={per_node}, {tasks_on_node} tasks per node"
            )
        if per_node > _MOST_GPUS:
            raise ClusterEnvironmentError(
                f"No node has more than {_MOST_GPUS} GPUs. Check SLURM_GPUS_ON_NODE, or give "
                f"`gpus_per_node`. Received: {per_node} GPUs per node"
            )
        self._per_node = per_node
        self.per_task = per_task

    def _count(self) -> int:
        on_node = _count_of("SLURM_GPUS_ON_NODE")
        if on_node is not None:
            return on_node
        return _count_with_nvidia_smi() if self._visible is None else len(self._visible)

    def show_to_this_process(self, local_id: int) -> None:
        """Sets CUDA_VISIBLE_DEVICES to the GPUs of the `local_id`-th task on this node."""
        if self._per_node and not self._is_share:
            visible = self._visible or []
            all_ids = visible if len(visible) >= self._per_node else [*map(str, range(self._per_node))]
            first = local_id * self.per_task
            own = all_ids[first : first + self.per_task]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def _visible_gpus() -> list[str] | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    none = ("", "-1", "NoDevFiles")  # Slurm writes the last one if a job has no GPUs
    return [] if visible in none else visible.split(",")


def _count_of(name: str) -> int | None:
    """The number in a variable such as '4', 'a100:4' or 'a100:2,v100:2'."""
    value = os.environ.get(name)
    if value is None:
        return None
    return sum(
        task_index(part.rpartition(":")[2], f"A number in the environment variable {name}")
        for part in value.split(",")
    )


def _count_with_nvidia_smi() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        done = subprocess.run(
            [program, "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterEnvironmentError(
            f"The GPUs cannot be counted with nvidia-smi. Give `gpus_per_node`. Received: {error}"
        ) from error
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
