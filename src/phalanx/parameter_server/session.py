"""A run: what tasks need to know to reach the parameter servers of a coordinator's program."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from phalanx.cluster.spec import ClusterSpec
from phalanx.job.hub.descriptions import Task
from phalanx.job.preflight import is_loopback
from phalanx.job.tokens import find_token
from phalanx.net.addresses import split_address
from phalanx.parameter_server.client import ServerConnections
from phalanx.parameter_server.durability import Durability
from phalanx.parameter_server.options import ParameterServerOptions

__all__ = ["Session", "new_run"]


@dataclass(frozen=True)
class Session:
    """What all tasks of a run share.

    Args:
        run: names it; no other run has this name.
        key: the job's secret.
        servers: the ps tasks.
        workers: the worker tasks.
        options: as the user gave them.
        earlier: the runs from whose checkpoints it goes on; functions in these know variables by them.
    """

    run: str
    key: bytes
    servers: tuple[Task, ...]
    workers: tuple[Task, ...]
    options: ParameterServerOptions
    earlier: tuple[str, ...] = ()

    @staticmethod
    def of(cluster: ClusterSpec, options: ParameterServerOptions, run: str = "") -> Session:
        """A run on a cluster; a new one if it is not named.

        >>> import os
        >>> os.environ["PHALANX_TOKEN"] = "known to all tasks of the job"
        >>> cluster = ClusterSpec({"worker": ["localhost:1"], "ps": ["localhost:2"]})
        >>> Session.of(cluster, ParameterServerOptions()).servers
        (Task(type='ps', id=0, address='localhost:2'),)
        >>> del os.environ["PHALANX_TOKEN"]
        """
        addresses = [a for job in cluster.jobs for a in cluster.job_tasks(job) if a is not None]
        is_local = all(is_loopback(split_address(address)[0]) for address in addresses)
        key = find_token(is_local).encode()
        servers, workers = (_tasks(cluster, job) for job in ("ps", "worker"))
        return Session(run or new_run(), key, servers, workers, options)

    @property
    def runs(self) -> tuple[str, ...]:
        """The run, and those from whose checkpoints it goes on."""
        return self.run, *self.earlier

    def connect(self, *, begin: bool = False) -> ServerConnections:
        """Reach all servers.

        Args:
            begin: whether this is the coordinator's program, with which the run begins.
        """
        options = self.options
        return ServerConnections(
            [server.address for server in self.servers],
            self.key,
            self.run,
            earlier=self.earlier,
            begin=begin,
            delivery=options.delivery,
            arbiter=options.backup_workers > 0,
            durability=Durability(options.durability, options.sync),
            timeout=options.server_timeout,
        )


def new_run() -> str:
    """A name that no other run has."""
    return secrets.token_hex(16)


def _tasks(cluster: ClusterSpec, job: str) -> tuple[Task, ...]:
    return tuple(Task(job, i, cluster.task_address(job, i)) for i in cluster.task_indices(job))
