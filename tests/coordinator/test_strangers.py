"""Peers that do not belong to a job, at every port that its tasks have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from tests.coordinator.jobs import Job
from tests.strangers import HOSTILE, SECONDS, Tapped, is_closed_after, knock

import phalanx as px
from phalanx import errors
from phalanx.coordinator.overview import ReportEndpoint, ask
from phalanx.job.launch.ports import PortReservation
from phalanx.net.client import authenticate
from phalanx.net.endpoint import dial

TOKEN = "the token of this job"
KEY = TOKEN.encode()
PURPOSES = {"ps": "ps", "worker": "closures", "chief": "rpc"}
"""What each task serves."""


class Running(NamedTuple):
    tasks: Job
    total: Any
    addresses: dict[str, str]

    def is_unharmed(self) -> bool:
        """Whether the coordinator, a worker and a server still do their work."""
        total = self.total
        before = float(total.numpy())

        @px.function
        def step() -> None:
            total.assign_add(1.0)

        self.tasks.coordinator.schedule(step)
        self.tasks.coordinator.join()
        answers = all(ask(address, KEY, SECONDS) for address in self.addresses.values())
        return answers and float(total.numpy()) == before + 1.0


@pytest.fixture(scope="module")
def job() -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch, PortReservation(1) as reservation:
        patch.setenv("PHALANX_TOKEN", TOKEN)
        chief = f"localhost:{reservation.ports[0]}"
        with Job(1, 1) as tasks:
            total = tasks.variable(0.0)
            report = ReportEndpoint(chief, KEY, tasks.coordinator.report)
            named = {kind: tasks.cluster[kind][0] for kind in ("ps", "worker")}
            yield Running(tasks, total, {**named, "chief": chief})
            report.close()


@pytest.mark.parametrize("nearby", [False, True])
@pytest.mark.parametrize("task", PURPOSES)
def test_garbage(job: Running, task: str, nearby: bool) -> None:
    for data in HOSTILE:
        with knock(job.addresses[task], KEY if nearby else None) as sock:
            assert is_closed_after(sock, data)
    assert job.is_unharmed()


@pytest.mark.parametrize("task", PURPOSES)
@pytest.mark.parametrize("token", [b"", b"guess"])
def test_a_wrong_token_or_none(job: Running, task: str, token: bytes) -> None:
    with pytest.raises(errors.UnauthenticatedError, match="PHALANX_TOKEN"):
        dial(job.addresses[task], token, {"for": PURPOSES[task]}, SECONDS)
    assert job.is_unharmed()


@pytest.mark.parametrize("task", PURPOSES)
def test_a_replay(job: Running, task: str) -> None:
    purpose = {"for": PURPOSES[task]}
    tapped = Tapped(knock(job.addresses[task]))
    authenticate(tapped, KEY, purpose, SECONDS).close()  # type: ignore[arg-type]
    with knock(job.addresses[task]) as sock:
        sock.sendall(tapped.sent)
        assert b"this token is not right" in sock.recv(1 << 16) + sock.recv(1 << 16)
    assert job.is_unharmed()


@pytest.mark.parametrize("task", PURPOSES)
def test_those_who_say_nothing_keep_no_one_out(job: Running, task: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(knock(job.addresses[task])).sendall(b"\0")
        assert job.is_unharmed()


@pytest.mark.parametrize("task", PURPOSES)
def test_what_a_task_does_not_serve(job: Running, task: str) -> None:
    with pytest.raises(errors.UnavailableError, match="does not serve"):
        dial(job.addresses[task], KEY, {"for": "something else"}, SECONDS)
    assert job.is_unharmed()
