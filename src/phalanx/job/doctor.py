"""What may be wrong with a cluster before a job is started: the logic of ``phalanx doctor``.

`doctor` prints what `examine` finds on this machine. With ``together=True``, started on all workers at
the same time, the workers also compare what they have and try to reach each other.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.tfconfig import TFConfigClusterResolver
from phalanx.errors import PhalanxError
from phalanx.job.bootstrap import join_hub
from phalanx.job.hub.client import Member, versions
from phalanx.job.observer import Observer
from phalanx.job.preflight import (
    Membership,
    bind_host,
    find_membership,
    is_loopback,
    port_problem,
    resolve,
)
from phalanx.job.tokens import find_token
from phalanx.net.addresses import join_address, listen, split_address

_VARIABLES = (
    "XLA_",
    "JAX_",
    "PHALANX_",
    "TF_CONFIG",
    "NCCL_",
    "GLOO_",
    "PJRT_",
    "CUDA_VISIBLE",
    "MALLOC_",
)
_SECRET = ("PHALANX_TOKEN",)
_OWN = ("TF_CONFIG", "PHALANX_HUB", "PHALANX_PROCESS_MARK")  # may differ between workers
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_MARKS = {"ok": "[green]ok[/]     ", "warning": "[yellow]warning[/]", "error": "[red]error[/]  "}


@dataclass(frozen=True)
class Finding:
    """Something that was looked at: how it is (ok, warning or error), what it is, and what to say."""

    level: str
    subject: str
    text: str


def doctor(
    resolver: ClusterResolver | None = None,
    *,
    together: bool = False,
    timeout: float = 30.0,
    console: Console | None = None,
) -> int:
    """Print what is right and wrong with the cluster; returns an exit code: 1 if there is an error.

    `resolver` is TF_CONFIG's by default. With `together` all workers run this at the same time, to
    compare and to reach each other.
    """
    console = console or Console()
    resolver = resolver or TFConfigClusterResolver()
    findings = examine(resolver)
    if together and not any(f.level == "error" for f in findings):
        findings += examine_together(resolver, timeout=timeout)
    for finding in findings:
        console.print(_MARKS[finding.level], end=" ")
        console.print(f"{finding.subject}: {finding.text}", markup=False, highlight=False)
    return 1 if any(f.level == "error" for f in findings) else 0


def examine(resolver: ClusterResolver) -> list[Finding]:
    """Look at everything that can be known on this machine alone."""
    own = versions()
    findings = [Finding("ok", "versions", ", ".join(f"{name} {v}" for name, v in own.items()))]
    findings.append(Finding("ok", "machine", f"{socket.gethostname()}, {platform.platform()}"))
    try:
        if not resolver.cluster_spec():
            text = "There is no cluster: TF_CONFIG is not set. A program here runs on its own."
            return [*findings, Finding("ok", "cluster", text), *_environment([])]
        membership = find_membership(resolver)
    except PhalanxError as error:
        return [*findings, Finding("error", "cluster", str(error))]
    listed = ", ".join(f"{task} at {task.address}" for task in membership.tasks)
    findings.append(Finding("ok", "cluster", f"{listed}; this is {membership.task}"))
    findings += _names(membership)
    findings.append(_own_port(membership))
    findings.append(_token(membership))
    if (hub := os.environ.get("PHALANX_HUB")) is not None:
        findings.append(_hub(hub, membership))
    return [*findings, *_environment([split_address(task.address)[0] for task in membership.tasks])]


def _names(membership: Membership) -> list[Finding]:
    findings = []
    for host in dict.fromkeys(split_address(task.address)[0] for task in membership.tasks):
        try:
            addresses = resolve(host)
        except PhalanxError as error:
            findings.append(Finding("error", f"name {host}", str(error)))
            continue
        mine = host == split_address(membership.task.address)[0]
        if not membership.is_local and not mine and all(is_loopback(at) for at in addresses):
            text = f"stands for {', '.join(addresses)} here, which is this machine and not the other"
            findings.append(Finding("error", f"name {host}", text))
        else:
            findings.append(Finding("ok", f"name {host}", ", ".join(addresses)))
    return findings


def _own_port(membership: Membership) -> Finding:
    problem = port_problem(membership.task, os.environ.get("PHALANX_BIND"))
    if problem is None:
        return Finding("ok", "port", f"{membership.task} can listen at {membership.task.address}")
    # Under a launcher no process needs to listen there.
    return Finding("warning" if "PHALANX_HUB" in os.environ else "error", "port", problem)


def _token(membership: Membership) -> Finding:
    try:
        find_token(membership.is_local)
    except PhalanxError as error:
        return Finding("error", "token", str(error))
    given = "PHALANX_TOKEN" in os.environ
    return Finding("ok", "token", "from PHALANX_TOKEN" if given else "your own, for this machine only")


def _hub(address: str, membership: Membership) -> Finding:
    try:
        with Observer(address, find_token(membership.is_local), timeout=3.0) as observer:
            rows = observer.table().rows
    except PhalanxError as error:
        return Finding("error", "hub", str(error))
    joined = sum(row["state"] == "joined" for row in rows)
    return Finding("ok", "hub", f"answers at {address}; {joined} of {len(rows)} workers have joined")


def _environment(hosts: Sequence[str]) -> list[Finding]:
    findings = []
    remote = [host for host in hosts if not is_loopback(host)]
    proxies = [v for name in _PROXIES for v in (name, name.upper()) if os.environ.get(v)]
    exempt = (os.environ.get("no_proxy", "") + "," + os.environ.get("NO_PROXY", "")).split(",")
    behind = [h for h in remote if not any(e and h.endswith(e.strip().lstrip("*")) for e in exempt)]
    if proxies and behind and "*" not in exempt:
        text = (
            f"{', '.join(proxies)} is set, and no_proxy does not name {', '.join(behind)}: the "
            "processes would look for each other through the proxy. Add the names to no_proxy."
        )
        findings.append(Finding("warning", "proxy", text))
    shown = {k: v for k, v in sorted(_variables().items()) if k not in _OWN}
    text = (
        ", ".join(f"{name}={value}" for name, value in shown.items()) or "nothing that matters is set"
    )
    return [*findings, Finding("ok", "environment", text)]


def _variables() -> dict[str, str]:
    return {
        name: "(secret)" if name in _SECRET else value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES)
    }


# -- all workers ---------------------------------------------------------------------------------------


def examine_together(resolver: ClusterResolver, *, timeout: float = 30.0) -> list[Finding]:
    """Join the other workers, compare versions and environments, and try to reach each of them."""
    try:
        membership = find_membership(resolver)
        member, _ = join_hub(membership, timeout)
    except PhalanxError as error:
        return [Finding("error", "workers", str(error))]
    try:
        return _compare(member, membership, timeout)
    except PhalanxError as error:
        return [Finding("error", "workers", str(error))]
    finally:
        member.leave()


def _compare(member: Member, membership: Membership, timeout: float) -> list[Finding]:
    own = {
        "variables": _variables(),
        "cores": os.cpu_count(),
        "host": socket.gethostname(),
        **versions(),
    }
    reports = member.exchange("doctor", own, timeout)
    names = [str(task) for task in membership.tasks]
    findings = [Finding("ok", "workers", f"all {len(names)} have joined")]
    for name in ("phalanx", "jax", "python", "cores"):
        findings += _difference(name, names, [report[name] for report in reports])
    variables = sorted({key for report in reports for key in report["variables"]} - set(_OWN))
    for name in variables:
        values = [report["variables"].get(name) for report in reports]
        findings += _difference(name, names, values)
    problems = [*member.exchange("reach", _reach_all(member, membership, timeout), timeout)]
    unreached = [text for texts in problems for text in texts or ()]
    findings += [Finding("error", "network", text) for text in unreached]
    if not unreached:
        findings.append(Finding("ok", "network", "each worker reaches each other one"))
    return findings


def _difference(what: str, names: Sequence[str], values: Sequence[Any]) -> list[Finding]:
    if len(set(map(str, values))) == 1:
        return []
    text = ", ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
    return [Finding("warning", what, f"differs between workers. {text}")]


def _reach_all(member: Member, membership: Membership, timeout: float) -> list[str]:
    """Connect to a port of every other worker, as the devices will; returns what did not work."""
    # The system completes the connections of the others; none needs to be accepted.
    with listen(bind_host(membership.task, membership.is_local), 0) as listener:
        host = split_address(membership.task.address)[0]
        address = join_address(host, listener.getsockname()[1])
        addresses = member.exchange("ports", address, timeout)
        problems = []
        for task, target in zip(membership.tasks, addresses, strict=True):
            try:
                socket.create_connection(split_address(target), 5.0).close()
            except OSError as error:
                why = error.strerror or error
                problems.append(f"{membership.task} cannot reach {task} at {target}: {why}")
        member.exchange("reached", None, timeout)
    return problems
