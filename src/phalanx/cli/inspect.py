"""``phalanx explain`` and ``phalanx doctor``: what a job does, and what may be wrong with a cluster."""

from __future__ import annotations

import argparse
import contextlib

from rich.console import Console

from phalanx.cli.arguments import (
    add_job_arguments,
    add_resolver_arguments,
    one_job,
    resolver_of,
    seconds,
)
from phalanx.errors import NotFoundError, PhalanxError
from phalanx.job.doctor import doctor
from phalanx.job.explain import explain
from phalanx.job.launch.from_resolver import RESOLVERS
from phalanx.job.observer import Observer
from phalanx.job.registry import RunningJob, find_job

__all__ = ["add_doctor_parser", "add_explain_parser"]

_EXPLAIN = """\
Show what the workers of a running job do: a table with the phase, the step and the last call of each,
and their Python stacks. Of a job with parameter servers, show the queue, what each worker does and how
stale its values may be, and what each server holds. The exit code is 0 if the job is well, 1 if it has
failed or a task does not answer, and 2 if the job cannot be found or asked.
"""

_DOCTOR = """\
Examine this machine and the cluster that TF_CONFIG or a resolver describes: versions, names, ports, the
token, the hub and the environment. With --together, started on all workers at the same time, they also
compare what they have and try to reach each other. The exit code is 0 if nothing is wrong, and 1 if
something is.
"""


def add_explain_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``phalanx explain`` to the command line."""
    parser = commands.add_parser(
        "explain", help="show what a running job does", description=_EXPLAIN, allow_abbrev=False
    )
    add_job_arguments(
        parser,
        "the name of the program, the process id of the launcher, or the host:port of the hub, "
        "whose token is then taken from PHALANX_TOKEN (default: the only job of this user here)",
    )
    parser.add_argument("--no-stacks", action="store_true", help="show the table only")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=5.0,
        metavar="S",
        help="how long workers may take to answer (default: %(default)g seconds)",
    )
    parser.set_defaults(function=_explain)


def _explain(options: argparse.Namespace) -> int:
    job = one_job(options)
    servers = _servers(job)
    if servers is None:
        return explain(job, stacks=not options.no_stacks, timeout=options.timeout)
    from phalanx.coordinator.overview import show

    alone = False
    with (
        contextlib.suppress(PhalanxError, OSError),  # the tasks say more than the launcher
        Observer(servers.address, servers.token, options.timeout) as observer,
    ):
        alone = observer.workers_train(options.timeout)
    is_well = show(servers.servers, servers.token, options.timeout, Console(), alone=alone)
    return 0 if is_well else 1


def _servers(job: str | None) -> RunningJob | None:
    """The job, if it is one with parameter servers."""
    try:
        found = find_job(job)
    except NotFoundError:
        return None
    return found if found.servers else None


def add_doctor_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``phalanx doctor`` to the command line."""
    parser = commands.add_parser(
        "doctor", help="examine a cluster", description=_DOCTOR, allow_abbrev=False
    )
    parser.add_argument(
        "--together", action="store_true", help="compare with the other workers, which run this too"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=30.0,
        metavar="S",
        help="how long to wait for the others (default: %(default)g seconds)",
    )
    parser.add_argument(
        "--resolver", choices=sorted(RESOLVERS), help="what describes the cluster (default: TF_CONFIG)"
    )
    add_resolver_arguments(parser)
    parser.set_defaults(function=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    resolver = None if options.resolver is None else resolver_of(options)
    return doctor(resolver, together=options.together, timeout=options.timeout)
