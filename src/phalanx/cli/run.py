"""``phalanx run``: start a job of several processes, here, over ssh, or as one task of a cluster."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax

from phalanx.cli.arguments import (
    WantedWorkers,
    add_resolver_arguments,
    count,
    positive,
    resolver_of,
    seconds,
    wanted_workers,
    worker_range,
)
from phalanx.cli.terminal import JobView
from phalanx.errors import InvalidValueError, NotFoundError
from phalanx.job.elastic.orders import WorkerLimits
from phalanx.job.launch.elastic_launcher import run_elastic_job
from phalanx.job.launch.exit_policy import Patience
from phalanx.job.launch.from_resolver import RESOLVERS, resolved_config
from phalanx.job.launch.launcher import Hosts, Job, placed_tasks, planned_commands, run_job
from phalanx.job.launch.ray_engine import RayOptions, parse_resources
from phalanx.job.launch.remote import shell_text
from phalanx.job.launch.task_environment import job_tasks, task_environment
from phalanx.runtime.deadlines import worker_deadline
from phalanx.runtime.formatting import shown

__all__ = ["add_run_parser", "quiet_jax", "run"]

_DESCRIPTION = """\
Start a program as a job of several processes, one for each task of a cluster. Each process gets the
TF_CONFIG that it would have in a real cluster, and its output is shown with its name in front. The
first failure ends all processes, and what the failed one wrote is shown last. Only a job with a
coordinator (--ps) goes on without a worker that fails, as long as another is left; and one of
--workers MIN:MAX, whose program uses px.train.elastic, without a worker that is killed or taken away.
The exit code is 0
exactly if all processes have succeeded, and else that of the first that failed (128 + n if signal n
ended it). SIGTERM is passed on to all processes. SIGUSR1 is a notice that machines will be taken away:
workers with a px.experimental.PreemptionCheckpointHandler save, and end with code 143. After SIGTERM
they have --terminate-grace seconds for that, even if their grace_period is longer.
"""


def add_run_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``phalanx run`` to the command line."""
    parser = commands.add_parser(
        "run",
        help="start a program as a job of several processes",
        description=_DESCRIPTION,
        usage="phalanx run [options] script.py [arguments ...]\n"
        "       phalanx run [options] -m module [arguments ...]",
        allow_abbrev=False,
    )
    parser.set_defaults(function=run)
    _add_tasks(parser.add_argument_group("tasks"))
    _add_processes(parser.add_argument_group("processes"))
    _add_places(parser.add_argument_group("other machines"))
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the program and its arguments")


def _add_tasks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-n",
        "--workers",
        type=worker_range,
        action="append",
        metavar="N|MIN:MAX",
        help="workers (default: 1). With MIN:MAX, workers may come and go: the job goes on without "
        "those that are lost, starts others in their place (--restarts), and can be resized "
        "(phalanx resize). It begins with MAX workers; -n N --workers MIN:MAX begins with N",
    )
    group.add_argument(
        "--wait",
        type=seconds,
        metavar="S",
        help="with MIN:MAX, how long to wait for workers while there are fewer than MIN (default: 300)",
    )
    group.add_argument("--ps", type=count, default=0, metavar="K", help="parameter servers, too")
    group.add_argument(
        "--chief",
        action=argparse.BooleanOptionalAction,
        help="a chief, too (default: with parameter servers, where it is the coordinator)",
    )
    group.add_argument("--evaluator", action="store_true", help="an evaluator, too")


def _add_processes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--devices-per-worker",
        type=positive,
        metavar="D",
        help="logical CPU devices of each process (default: as the program or the environment says)",
    )
    group.add_argument(
        "--retain-memory",
        action="store_true",
        help="let processes keep freed memory: faster steps of large models on CPU devices",
    )
    group.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help=_ENV_HELP)
    group.add_argument("--python", metavar="PATH", help="the interpreter (default: this one)")
    group.add_argument(
        "--restarts",
        type=count,
        metavar="K",
        help="start all processes again after a failure, up to K times (default: 0); with parameter "
        "servers, start only the failed one again, each up to K times; with MIN:MAX workers, start up "
        "to K others in place of lost ones (default: 3); PHALANX_RESTART counts them",
    )
    group.add_argument(
        "--timeout", type=seconds, metavar="S", help="end the job after S seconds, with exit code 124"
    )
    group.add_argument(
        "--grace",
        type=seconds,
        default=Patience().peers,
        metavar="S",
        help="how long the others may go on after a failure (default: %(default)g seconds)",
    )
    group.add_argument(
        "--terminate-grace",
        type=seconds,
        default=Patience().terminate,
        metavar="S",
        help="how long processes may take to save and end after SIGTERM, before they are killed: at "
        "least the grace_period of a PreemptionCheckpointHandler (default: %(default)g seconds)",
    )
    group.add_argument("--no-progress", action="store_true", help="show no progress bar")
    group.add_argument(
        "--dry-run", action="store_true", help="show what would be started, and start nothing"
    )


_ENV_HELP = "a variable for all processes; without a value, that of this process is passed on"


def _add_places(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hosts",
        metavar="A,B,…",
        help="start one worker on each of these hosts over ssh; a host may be user@name:port",
    )
    group.add_argument(
        "--ssh", default=Hosts.ssh, metavar="COMMAND", help="how to log in (default: %(default)s)"
    )
    group.add_argument(
        "--hub-address", metavar="ADDRESS", help="the address of this machine for the hosts"
    )
    group.add_argument(
        "--engine",
        choices=["processes", "ray"],
        default="processes",
        help="who places the processes: this command, or Ray (default: %(default)s)",
    )
    group.add_argument(
        "--ray-address", metavar="ADDRESS", help="the Ray cluster (default: RAY_ADDRESS, or a new one)"
    )
    group.add_argument(
        "--ray-resources",
        action="append",
        default=[],
        metavar="TYPE:NAME=NUMBER,…",
        help="what each task of a type needs, such as worker:GPU=1,CPU=4 (default: CPU=1)",
    )
    group.add_argument(
        "--ray-strategy",
        choices=["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        default="PACK",
        help="how Ray spreads tasks over its nodes (default: %(default)s)",
    )
    group.add_argument(
        "--resolver",
        choices=sorted(RESOLVERS),
        help="become one task of a cluster that others have started: ask who this process is, and run "
        "the program in its place",
    )
    add_resolver_arguments(group)


def run(options: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit code."""
    argv, name = _program(options)
    if options.resolver is not None:
        return _become_task(options, argv)
    wanted = wanted_workers(options.workers or [])
    job = _job(options, argv, name, None if options.workers is None else wanted.most)
    limits = _limits(options, wanted)
    if options.dry_run:
        return _show(job)
    view = JobView(job.tasks, name, sys.stdout, sys.stderr, bar=not options.no_progress)
    with quiet_jax(), contextlib.closing(view):
        if limits is None:
            return run_job(job, view).exit_code
        return run_elastic_job(job, view, limits, wanted.first).exit_code


def _limits(options: argparse.Namespace, wanted: WantedWorkers) -> WorkerLimits | None:
    """How the workers may come and go; None if they may not."""
    if not wanted.is_range:
        if options.wait is not None:
            raise InvalidValueError(
                "--wait is for workers that come and go: --workers MIN:MAX. "
                f"Received: --wait {options.wait:g}"
            )
        return None
    if options.ps or options.chief or options.evaluator:
        raise InvalidValueError(
            "Only workers that train together can come and go as --workers MIN:MAX says. A coordinator "
            "(--ps) goes on without workers anyway: give one number. "
            f"Received: --workers {wanted.least}:{wanted.most} with other tasks"
        )
    patience = 300.0 if options.wait is None else options.wait
    replacements = 3 if options.restarts is None else options.restarts
    return WorkerLimits(wanted.least, wanted.most, replacements, patience, deadline=worker_deadline())


@contextlib.contextmanager
def quiet_jax() -> Iterator[None]:
    """The hub runs JAX's coordination service here, which warns that it can recover."""
    before = jax.config.jax_logging_level  # type: ignore[attr-defined]
    jax.config.update("jax_logging_level", "ERROR")
    try:
        yield
    finally:
        jax.config.update("jax_logging_level", before)


def _program(options: argparse.Namespace) -> tuple[list[str], str]:
    python = options.python or sys.executable
    if options.module:
        return [python, "-m", *options.module], options.module[0]
    if options.module is not None or not options.script:
        raise InvalidValueError(
            "Say which program to run: phalanx run -n 2 train.py. Received: nothing"
        )
    script = options.script[1:] if options.script[0] == "--" else options.script
    if options.hosts is None and not Path(script[0]).exists():
        raise NotFoundError(f"There is no such file. Received: {shown(script[0])}")
    return [python, *script], Path(script[0]).name


def _job(options: argparse.Namespace, argv: list[str], name: str, workers: int | None) -> Job:
    hosts = None
    if options.hosts is not None:
        hosts = Hosts(options.hosts, options.ssh, options.hub_address)
        workers = len(options.hosts.split(",")) if workers is None else workers
    chief = options.ps > 0 if options.chief is None else options.chief
    ray = _ray(options)
    base = {} if hosts is not None or ray is not None else dict(os.environ)
    return Job(
        argv,
        job_tasks(1 if workers is None else workers, options.ps, chief, options.evaluator),
        name,
        environ=base | _extra_environment(options.env),
        devices=options.devices_per_worker,
        retain_memory=options.retain_memory,
        timeout=options.timeout,
        restarts=options.restarts or 0,
        patience=replace(Patience(), peers=options.grace, terminate=options.terminate_grace),
        hosts=hosts,
        ray=ray,
        python=options.python or sys.executable,
    )


def _ray(options: argparse.Namespace) -> RayOptions | None:
    if options.engine != "ray":
        return None
    if options.hosts is not None:
        raise InvalidValueError(
            "Ray places the processes itself: leave --hosts or --engine out. "
            f"Received: --engine ray --hosts {options.hosts}"
        )
    resources = parse_resources(options.ray_resources)
    return RayOptions(options.ray_address, resources, options.ray_strategy)


def _extra_environment(words: list[str]) -> dict[str, str]:
    extra = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not (equals or name in os.environ):
            raise InvalidValueError(
                f"A variable is NAME=VALUE, or the name of one that is set. Received: {shown(word)}"
            )
        extra[name] = value if equals else os.environ[name]
    return extra


def _show(job: Job) -> int:
    # Ray chooses the addresses of a real run; these are only an example.
    with placed_tasks(job) as tasks:
        here = planned_commands(replace(job, hosts=None, environ={}), tasks, "HOST:PORT", "")
        there = planned_commands(job, tasks, "HOST:PORT", "")
    for task, plain, command in zip(tasks, here, there, strict=True):
        print(f"# {task}")
        if command.remote is not None:
            print(f"# {shell_text(command.argv, {})}, which runs:")
        print(shell_text(plain.argv, plain.environ, plain.cwd))
    return 0


def _become_task(options: argparse.Namespace, argv: list[str]) -> int:
    settings = {
        "config": resolved_config(resolver_of(options)),
        "hub": os.environ.get("PHALANX_HUB"),
        "token": os.environ.get("PHALANX_TOKEN"),
        "devices": options.devices_per_worker,
        "retain_memory": options.retain_memory,
    }
    extra = _extra_environment(options.env)
    if not options.dry_run:
        try:
            os.execvpe(argv[0], argv, task_environment({**os.environ, **extra}, **settings))
        except OSError as error:
            raise NotFoundError(
                f"The interpreter cannot be started: {error.strerror}. Received: {shown(argv[0])}"
            ) from error
    print(shell_text(argv, task_environment(extra, **settings), os.getcwd()))
    return 0
