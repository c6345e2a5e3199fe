"""What the tasks of a job with parameter servers do: for ``phalanx explain``.

Servers answer remote calls of ``status``. So does the coordinator's program, if it is the chief of the
cluster: it then listens at the chief's address.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from phalanx.coordinator.rpc_service import LIMITS, PURPOSE, RpcService, error_of, pack, unpack
from phalanx.errors import PhalanxError
from phalanx.net.client import RequestClient
from phalanx.net.endpoint import Endpoint, dial

__all__ = ["ReportEndpoint", "ask", "show"]

_log = logging.getLogger("phalanx")

_UNITS = ("B", "KB", "MB", "GB", "TB")


class ReportEndpoint:
    """Lets others ask a coordinator what happens.

    Args:
        address: of the chief.
        key: the job's secret.
        report: what is answered.
    """

    def __init__(self, address: str, key: bytes, report: Callable[[], Any]) -> None:
        self._service: RpcService | None = None
        self._endpoint: Endpoint | None = None
        try:
            self._endpoint = Endpoint(address, key)
        except PhalanxError as error:  # the job works without
            _log.warning("`phalanx explain` cannot ask the coordinator. %s", error)
            return
        self._service = RpcService({"status": lambda: {"coordinator": report()}}, threads=1)
        self._endpoint.serve(PURPOSE, self._service.admit)
        self._endpoint.start()

    def close(self) -> None:
        """Stop listening."""
        if self._endpoint is not None and self._service is not None:
            self._endpoint.close()
            self._service.close(grace=0.0)


def ask(address: str, key: bytes, timeout: float) -> dict[str, Any]:
    """The status of one task."""
    sock = dial(address, key, {"for": PURPOSE}, timeout)
    client = RequestClient(sock, "phalanx-explain", limits=LIMITS).start()
    try:
        call = {"op": "call", "method": "status"}
        answer = client.request(call, pack(()), timeout=timeout)
    finally:
        client.close()
    if answer.fields["code"]:
        raise error_of(int(answer.fields["code"]), str(answer.fields.get("message", "")))
    status: dict[str, Any] = unpack(answer.buffers)
    return status


def show(
    servers: Mapping[str, str], token: str, timeout: float, console: Console, *, alone: bool = False
) -> bool:
    """Print what the tasks of a job do; whether all have answered.

    Args:
        servers: the addresses of the tasks, by name.
        token: of the job.
        timeout: seconds within which a task must answer.
        console: where to print.
        alone: whether workers train without a coordinator; then they do not answer.
    """
    trains = {
        name: "on its own; servers count its updates" for name in servers if alone and "ps" not in name
    }
    servers = {name: address for name, address in servers.items() if name not in trains}

    def one(address: str) -> dict[str, Any] | str:
        try:
            return ask(address, token.encode(), timeout)
        except (PhalanxError, OSError) as error:
            return str(error)

    with ThreadPoolExecutor(len(servers)) as threads:
        answers = dict(zip(servers, threads.map(one, servers.values()), strict=True))
    table = Table("task", "state", "doing", box=None)
    for name, doing in trains.items():
        table.add_row(name, "trains", doing)
    for name, answer in answers.items():
        table.add_row(name, *_row(name, answer))
    console.print(table)
    for answer in answers.values():
        if isinstance(answer, dict) and "coordinator" in answer:
            _show_workers(answer["coordinator"], console)
    return all(isinstance(answer, dict) for answer in answers.values())


def _row(name: str, answer: dict[str, Any] | str) -> tuple[str, str]:
    if isinstance(answer, str):
        return "silent", answer.partition(". Received")[0]
    if "coordinator" in answer:
        report = answer["coordinator"]
        counts = ", ".join(
            f"{report[key]} {key.replace('_', ' ')}"
            for key in ("queued", "in_flight", "in_doubt", "done", "retried")
        )
        return "coordinates", counts
    if "ps" in answer:
        return "serves", _holdings(answer["ps"])
    closures = answer.get("closures", {})
    now = ""
    if "function" in closures:
        now = f", now {closures['function']} for {closures['seconds']:.1f} s"
    return "works", f"{closures.get('closures', 0)} functions run{now}"


def _holdings(status: Mapping[str, Any]) -> str:
    parts = [
        f"{status.get('variables', 0)} variables",
        f"{size(status.get('bytes', 0))} held",
        f"{status.get('updates', 0)} updates",
        f"{size(status.get('bytes_in', 0))} in, {size(status.get('bytes_out', 0))} out",
    ]
    if status.get("log_bytes"):
        parts.append(f"{size(status['log_bytes'])} in the log")
    return ", ".join(parts)


def _show_workers(report: Mapping[str, Any], console: Console) -> None:
    table = Table("worker", "state", "in flight", "staleness", "ms per function", box=None)
    for worker in report["workers"]:
        pace = worker.get("seconds_per_closure")
        table.add_row(
            worker["task"],
            worker["state"] + (f" ({worker['reason']})" if worker["reason"] else ""),
            str(worker["in_flight"]),
            str(worker["staleness"]),
            "" if not pace else f"{1000 * pace:.2f}",
        )
    console.print()
    console.print(table)
    for server in report["servers"]:
        if server["state"] != "up":
            reason = server["reason"].partition(". Received")[0]
            text = f"has not answered the coordinator for {server['silent']:.0f} s: {reason}"
            console.print(f"\n{server['task']} {text}", markup=False)
    if report["last_error"]:
        console.print(f"\nThe last error: {report['last_error']}", markup=False)


def size(count: float) -> str:
    """A number of bytes for people.

    >>> size(512), size(2_500_000)
    ('512 B', '2.5 MB')
    """
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError(count)
