"""A hub and its members over real sockets, in one process."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import socket
import struct
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.processes import wait_until

from phalanx import errors
from phalanx.job.hub import silent_members
from phalanx.job.hub.client import Member, versions
from phalanx.job.hub.connect import connect_to_hub
from phalanx.job.hub.descriptions import Failure, Task
from phalanx.job.hub.server import Hub
from phalanx.job.observer import Observer
from phalanx.job.watchdog import Observation, WaitPolicy, Watchdog
from phalanx.net.addresses import listen, split_address
from phalanx.net.framing import Limits, Message, ProtocolError, encode
from phalanx.runtime.deadlines import STUCK_EXIT_CODE

TOKEN = "a token for tests"


def tasks(count):
    return [Task("worker", i, f"host{i}:2222") for i in range(count)]


@contextlib.contextmanager
def job(count, joined=None, **options):
    """A hub without JAX's service, and members that have joined."""
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(Hub(tasks(count), TOKEN, coordination=False, **options))
        members = []
        for rank in range(count if joined is None else joined):
            members.append(Member(hub.address, TOKEN, "worker", rank, timeout=20))
            stack.callback(members[-1].leave)
        if joined is None:
            for member in members:
                member.wait_joined(20)
        yield hub, members


def all_at_once(members, action):
    """What each member gets or raises from an action, done in a thread of its own."""

    def run(member):
        try:
            return action(member)
        except errors.PhalanxError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members, timeout=60))


def failures(members):
    for member in members:
        wait_until(lambda: member.failure is not None)
    return [member.failure.text for member in members]


# -- joining and exchanging -----------------------------------------------------------------------


def test_members_join_exchange_agree_and_leave():
    with job(3) as (hub, members):
        assert [m.rank for m in members] == [0, 1, 2]
        assert {m.size for m in members} == {3}
        got = all_at_once(members, lambda m: m.exchange("greeting", {"from": m.rank}))
        assert got == [[{"from": 0}, {"from": 1}, {"from": 2}]] * 3
        again = all_at_once(members, lambda m: m.exchange("greeting", m.rank * 10))
        assert again == [[0, 10, 20]] * 3
        details = {"operation": "all_reduce", "site": "train.py:3"}
        assert all_at_once(members, lambda m: m.agree(1, "abc", details)) == [None] * 3
        assert all_at_once(members, lambda m: m.meet("the end", 20.0)) == [True] * 3
        assert hub.failure is None
        for member in members:
            member.leave()
        assert hub.wait_over(20)
        assert [row["state"] for row in hub.table().rows] == ["left"] * 3


def test_notes_are_left_and_picked_up():
    """What a worker tells is kept for others that ask later; a launcher can tell all of them."""
    with job(3) as (hub, members):
        first, second, third = members
        first.tell("save", {"path": "x"})
        assert second.hear("save", [0], 10.0) == {0: {"path": "x"}}
        assert third.hear("save", [0], 10.0) == {0: {"path": "x"}}
        assert third.hear("save", [0, 1], 0.0) == {}  # picked up, and the second has told nothing
        assert first.hear("save", [0], 0.0) == {}  # who tells knows it
        heard = []
        third.tell("notice", 1)
        assert first.hear("notice", [2], 10.0) == {2: 1}
        second.when_told("notice", lambda rank, value: heard.append((rank, value)))
        hub.notice("notice", 2)
        assert first.hear("notice", [None], 10.0) == {None: 2}
        all_at_once(members, lambda member: member.exchange("after", None, 10.0))
        assert heard == [(2, 1), (None, 2)]
        second.when_told("notice", None)
        first.tell("notice", 3)
        assert second.hear("notice", [0], 10.0) == {0: 3}


def test_arrivals_are_told_to_those_who_wait():
    with job(2, joined=1) as (hub, members):
        arrived = []
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(members[0].wait_joined, 20, arrived.append)
            wait_until(lambda: arrived)
            assert arrived[0]["missing"] == ["worker 1"]
            other = Member(hub.address, TOKEN, "worker", 1)
            roster = waiting.result(20)
        assert [m["pid"] for m in roster["members"]] == [os.getpid()] * 2
        other.leave()


def test_who_is_missing_at_the_deadline_of_the_start_is_told_to_all():
    with job(3, joined=2) as (_, members):
        got = all_at_once(members, lambda m: m.wait_joined(0.2))
        assert [type(error) for error in got] == [errors.DeadlineExceededError] * 2
        assert str(got[0]) == str(got[1])
        assert "Missing: worker 2 (host2:2222)" in str(got[0])


@pytest.mark.parametrize(
    ("index", "about", "error"),
    [
        (0, {}, errors.DuplicateTaskError),
        (1, {"jax": "0.0.1"}, errors.VersionMismatchError),
        (1, {"phalanx": "0.0.1"}, errors.VersionMismatchError),
        (5, {}, errors.ClusterEnvironmentError),
    ],
)
def test_a_newcomer_that_does_not_fit_is_an_error_on_all_that_are_up(index, about, error):
    with job(3, joined=1) as (hub, members):
        newcomer = Member(hub.address, TOKEN, "worker", index, about=about)
        for member in (*members, newcomer):
            with pytest.raises(error):
                member.wait_joined(20)
        newcomer.leave()


# -- failures ---------------------------------------------------------------------------------------


def test_a_connection_that_closes_is_a_death_that_all_others_learn_at_once():
    with job(3) as (hub, members):
        members[1].status.phase = "input"
        members[1]._client.socket.shutdown(socket.SHUT_RDWR)
        first, second = failures([members[0], members[2]])
        assert first == second
        assert first.startswith(f"worker 1 (pid {os.getpid()} on {socket.gethostname()}) died")
        for member in (members[0], members[2]):
            with pytest.raises(errors.WorkerLostError, match="worker 1"):
                member.check()
            with pytest.raises(errors.WorkerLostError):
                member.exchange("more", 1)
        with pytest.raises(errors.HubLostError):
            members[1].check()
        assert hub.failure.task == "worker 1"


def test_a_waiting_member_is_freed_by_the_failure_of_another():
    with job(2) as (_, members):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(members[0].exchange, "a", 1)
            wait_until(lambda: members[0].wait is not None)
            try:
                raise KeyError("boom")
            except KeyError as error:
                members[1].report_exception(error)
            with pytest.raises(errors.WorkerFailedError) as caught:
                waiting.result(20)
        text = str(caught.value)
        assert f"worker 1 (pid {os.getpid()} on {socket.gethostname()}) raised KeyError: 'boom'" in text
        assert 'raise KeyError("boom")' in text, "with its traceback"


def test_a_failure_is_told_once_and_to_callbacks_that_come_later_too():
    with job(2) as (_, members):
        heard = []
        members[0].on_failure(heard.append)
        members[1].report(Failure("raised", "first"))
        members[1].report(Failure("raised", "second"))
        wait_until(lambda: heard)
        members[0].on_failure(heard.append)
        assert [failure.text for failure in heard] == ["first", "first"]


def test_an_echo_of_the_failure_is_not_reported_again():
    with job(3) as (hub, members):
        members[1].report(Failure("raised", "boom"))
        failures(members)
        sent = []
        members[0].report = sent.append
        members[0].report_exception(members[0].failure.error())
        assert sent == []
        members[0].report_exception(ValueError("something of its own"))
        assert [failure.kind for failure in sent] == ["raised"]
        assert hub.failure.text == "boom"


def test_a_mismatch_reads_the_same_on_all():
    with job(3) as (_, members):

        def agree(member):
            shape = "float32[2,3]" if member.rank else "float32[4,3]"
            site = f"train.py:{10 + member.rank} in step"
            details = {"operation": "all_reduce SUM", "arrays": [shape], "site": site}
            member.agree(1, shape, details)

        got = all_at_once(members, agree)
        assert [type(error) for error in got] == [errors.CollectiveMismatchError] * 3
        assert len({str(error) for error in got}) == 1
        assert "worker 0: all_reduce SUM of float32[4,3] at train.py:10 in step" in str(got[0])


def test_known_programs_in_another_order_are_found():
    with job(2) as (_, members):
        programs = [{"operation": "psum", "site": "a.py:1"}, {"operation": "pmax", "site": "a.py:2"}]

        def meet(member):
            mine = [dict(program) for program in programs]
            for number, digest in enumerate(("11111111", "22222222"), start=1):
                member.agree(number, digest, mine[number - 1])
                member.status.begin(number, mine[number - 1])
            order = mine if member.rank else mine[::-1]
            for number, details in enumerate(order, start=3):
                member.status.begin(number, details)

        assert all_at_once(members, meet) == [None, None]
        (text, _) = failures(members)
        assert "different programs at number 3" in text
        assert "worker 0: pmax at a.py:2\n  worker 1: psum at a.py:1" in text


def test_a_program_that_another_has_passed_is_shown():
    with job(2) as (_, members):
        members[1].status.begin(4, {"operation": "known", "site": "b.py:7"})
        with pytest.raises(errors.CollectiveMismatchError, match=r"worker 1: known at b\.py:7"):
            members[0].agree(4, "new", {"operation": "new"})


def test_broken_connections_are_explained():
    broken = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:2")
    with job(2) as (_, members):
        assert members[0].cause_of(ValueError("something of the user's")) is None
        assert members[0].cause_of(broken, timeout=0.05) is None
        members[1].leave()
        finished = r"worker 1 .* finished while worker 0"
        with (
            pytest.raises(errors.WorkerLostError, match=finished),
            members[0].waiting("train.py:3"),
        ):
            raise broken
        assert members[0].told


def test_a_hub_that_goes_is_an_error_with_a_name():
    with job(2) as (hub, members):
        hub.close(timeout=0.0)
        for member in members:
            wait_until(lambda: member.failure is not None)
            with pytest.raises(errors.HubLostError, match="next to the first worker"):
                member.check()


def test_the_launcher_tells_how_a_process_ended():
    with job(2, cause_of_death=lambda task: -11 if task.id == 1 else None) as (hub, members):
        members[1]._client.socket.shutdown(socket.SHUT_RDWR)
        assert "worker 1" in failures(members[:1])[0]
        assert "was killed by signal 11 (SIGSEGV)" in failures(members[:1])[0]
        hub.exited(Task("worker", 0), 3)
        assert hub.failure.kind == "died"


def test_the_launcher_is_told_whom_the_others_need_not_wait_for(monkeypatch):
    monkeypatch.setattr(silent_members, "_LEAST", 0.5)
    told = []

    def abandoned(member):
        told.append(member)
        return len(told) == 2  # it is told until it is settled

    with job(2, joined=1, abandoned=abandoned) as (hub, (member,)):
        frozen = connect_to_hub(hub.address, TOKEN, 20)  # it joins, and then says nothing more
        join = {"type": "join", "task_type": "worker", "task_id": 1, "pid": 7, "host": "here"}
        frozen.sendall(b"".join(encode(Message({**join, **versions(), "cluster": ""}), Limits())))
        with contextlib.closing(frozen):
            member.wait_joined(20)
            member.come_to_end(0.5)
            wait_until(lambda: len(told) == 2)
    assert told[0] == told[1]
    assert (str(told[0].task), told[0].pid) == ("worker 1", 7)
    assert "Nothing has been heard of worker 1 (pid 7 on here) for 0.5 seconds" in told[0].why


def test_a_forked_child_does_not_keep_the_connection_open():
    with job(2) as (_, members):
        read, write = os.pipe()
        done, go = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX, which has threads, warns of forks
            pid = os.fork()
        if pid == 0:  # a child that outlives what its parent had open
            os.write(write, b"!")
            os.read(done, 1)
            os._exit(0)
        try:
            os.read(read, 1)
            members[1]._client.socket.close()
            assert "worker 1" in failures(members[:1])[0]
        finally:
            os.write(go, b"!")
            os.waitpid(pid, 0)
            for fd in (read, write, done, go):
                os.close(fd)


# -- who does what --------------------------------------------------------------------------------


def test_the_table_shows_what_members_do():
    with job(2) as (hub, members):
        members[0].status.begin(7, None)
        members[0].status.step = 70
        members[0].status.phase, members[0].status.site = "step", "train.py:8 in step"
        members[1].status.phase = "input"
        wait_until(lambda: hub.table().rows[0]["step"] == 70 and hub.table().rows[1]["behind"] > 0)
        text = str(hub.table())
        assert "train.py:8 in step" in text
        assert hub.table().late()[0]["worker"] == "worker 1"
        with Observer(hub.address, TOKEN) as observer:
            assert observer.table().rows[0]["sequence"] == 7
            assert observer.failure() is None
            members[1].report(Failure("raised", "boom"))
            assert observer.failure() == "boom"


def test_stacks_of_all_members():
    with job(2) as (hub, _), Observer(hub.address, TOKEN) as observer:
        stacks = observer.stacks()
        assert sorted(stacks) == ["worker 0", "worker 1"]
        assert "test_stacks_of_all_members" in stacks["worker 1"]


def test_a_deadline_has_the_stack_of_the_late_one():
    with job(2) as (_, members):
        members[1].status.phase, members[1].status.site = "input", "load.py:3 in read"
        with pytest.raises(errors.DeadlineExceededError) as caught:
            members[0].agree(1, "a", {"operation": "psum", "site": "train.py:3"}, timeout=0.3)
        text = str(caught.value)
        assert "worker 0 waited for 0.3 seconds at train.py:3" in text
        assert "in phase 'input' at load.py:3 in read" in text
        assert "test_a_deadline_has_the_stack_of_the_late_one" in text
        assert failures(members) == [text, text]


# -- peers that do not belong ------------------------------------------------------------------------


def test_a_wrong_token_is_an_error_at_once_and_harms_nobody():
    with job(2, joined=1) as (hub, members):
        with pytest.raises(errors.UnauthenticatedError, match="PHALANX_TOKEN"):
            Member(hub.address, "another token", "worker", 1, timeout=20)
        assert members[0].failure is None


def test_garbage_on_the_port_harms_nobody():
    chance = random.Random(0)
    with job(2) as (hub, members):
        for _ in range(50):
            stranger = socket.create_connection(split_address(hub.address), 5.0)
            with stranger, contextlib.suppress(OSError):
                stranger.sendall(chance.randbytes(chance.randrange(1, 4000)))
        silent = [socket.create_connection(split_address(hub.address), 5.0) for _ in range(5)]
        assert all_at_once(members, lambda m: m.exchange("still", m.rank)) == [[0, 1]] * 2
        for stranger in silent:
            stranger.close()
        assert hub.failure is None


def test_many_silent_strangers_are_dropped():
    with job(1) as (hub, members):
        crowd = [socket.create_connection(split_address(hub.address), 5.0) for _ in range(80)]
        wait_until(lambda: hub._listener.strangers <= 64, seconds=8.0)  # less than a silent one has
        assert members[0].exchange("still", 1) == [1]
        for stranger in crowd:
            stranger.close()


def test_a_member_that_talks_nonsense_is_dropped_and_named():
    with job(2) as (_, members):
        members[1]._send({"type": "nonsense"})
        assert "worker 1" in failures(members[:1])[0]


@pytest.mark.parametrize(
    "body",
    [
        '{"type":"join","task_type":"worker","task_id":1e999}',
        '{"type":"status","sequence":1e999}',
        '{"type":"status","seconds":NaN}',
        '{"type":"deadline","seconds":Infinity}',
        '{"type":"status","sequence":' + "9" * 5000 + "}",
        '{"type":"status","sequence":' + "9" * 90 + "}",
        '{"type":"status","waits":[{"ranks":[-1]}]}',
        '{"type":"post","name":"a","last":0,"operations":{"b":-1}}',
        "[" * 100_000,
    ],
)
def test_numbers_that_are_none_are_refused_by_name_and_the_others_are_answered(body):
    with job(3) as (hub, members):
        frame = b"plx2" + struct.pack("!III", 0, len(body), 0) + body.encode()
        client = members[1]._client
        client.loop.call_soon(lambda: client._connection.push([memoryview(frame)]))
        (first, third) = failures([members[0], members[2]])
        assert first == third
        assert first.startswith("worker 1 ")
        assert "sent what the hub does not understand, and was dropped" in first
        assert len(members[0].table()[0].rows) == 3
        assert hub.table().rows[2]["state"] == "joined"


def test_what_is_no_hub_is_an_error_at_once():
    with listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]

        def answer():
            peer, _ = other.accept()
            peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match=f"not a hub of Phalanx.*127.0.0.1:{port}"):
            Member(f"127.0.0.1:{port}", TOKEN, "worker", 0, timeout=20)
        thread.join(20)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("no-such-host.invalid:2222", "the name 'no-such-host.invalid' is not known"),
        ("127.0.0.1:1", "nothing listens there"),
    ],
)
def test_an_address_without_a_hub(address, reason):
    with pytest.raises(errors.DeadlineExceededError, match=reason):
        Member(address, TOKEN, "worker", 0, timeout=0.2)


def test_a_port_in_use_is_named():
    with listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(errors.ClusterEnvironmentError, match=f"127.0.0.1:{port}"):
            Hub(tasks(1), TOKEN, port=port, coordination=False).start()


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:x", "host:70000", ""])
def test_what_is_no_address(address):
    with pytest.raises(errors.InvalidValueError, match="host0:2222"):
        split_address(address)


# -- the watchdog -------------------------------------------------------------------------------------


class Pending:
    """Stands for a result that a device has not computed yet."""

    def is_ready(self):
        return False


def watchdog(member, file, ended, **options):
    settings = {"warn_after": 0.1, "every": 60.0, "deadline": 60.0, "grace": 60.0, **options}
    return Watchdog(member, file=file, end=ended.append, **settings)


@pytest.mark.parametrize("how", ["python", "device"])
def test_the_table_is_shown_once_by_the_first_who_waits(how):
    with job(3) as (hub, members), contextlib.ExitStack() as stack:
        files = [io.StringIO() for _ in range(3)]
        members[2].status.phase, members[2].status.site = "input", "load.py:1"
        wait_until(lambda: hub.table().rows[2]["site"] == "load.py:1")
        for member in members[:2]:
            member.status.begin(5, None)
            if how == "python":
                stack.enter_context(member.waiting("train.py:3"))
            else:
                member.status.site, member.status.pending = "train.py:3", Pending()
        wait_until(lambda: [row["sequence"] for row in hub.table().rows[:2]] == [5, 5])
        for member, file in zip(members[:2], files, strict=False):
            stack.callback(watchdog(member, file, []).start().stop)
        wait_until(lambda: all("waits" in file.getvalue() for file in files[:2]))
        stack.pop_all().close()
        texts = [file.getvalue() for file in files[:2]]
        for i in (0, 1):
            assert texts[i].count(f"phalanx: worker {i} waits for worker 2 at train.py:3.") == 1
        assert sorted("last call" in text for text in texts) == [False, True], "one shows the table"
        # What a worker says of itself, or the line that its thread is at if that lasts.
        assert any(re.search(r"load.py:1|(test_hub|processes).py:", text) for text in texts)


def test_nothing_is_shown_while_all_are_in_the_same_program():
    with job(2) as (hub, members):
        file = io.StringIO()
        for member in members:
            member.status.begin(5, None)
        wait_until(lambda: [row["sequence"] for row in hub.table().rows] == [5, 5])
        members[0].status.pending = Pending()
        dog = watchdog(members[0], file, [], warn_after=0.05, every=0.05, deadline=0.2).start()
        asked = []
        original = members[0].table
        members[0].table = lambda *a, **k: asked.append(1) or original(*a, **k)
        wait_until(lambda: len(asked) > 3)
        dog.stop()
        assert file.getvalue() == ""
        assert members[0].failure is None


def test_at_the_deadline_all_fail_with_the_stack_of_the_late_one():
    with job(2) as (_, members), members[0].waiting("train.py:3"):
        members[0].status.begin(5, None)
        dog = watchdog(members[0], io.StringIO(), [], warn_after=60.0, deadline=0.4).start()
        texts = failures(members)
        dog.stop()
        assert texts[0] == texts[1]
        assert "worker 0 waited for 0.4 seconds at train.py:3" in texts[0]
        assert "Late: worker 1" in texts[0]
        assert "test_at_the_deadline_all_fail" in texts[0]


@pytest.mark.parametrize("how", ["python", "device"])
def test_a_process_that_hangs_after_a_failure_is_ended(how):
    with job(2) as (_, members), contextlib.ExitStack() as stack:
        file, ended = io.StringIO(), []
        if how == "python":
            stack.enter_context(members[0].waiting("train.py:3"))
        else:
            members[0].status.pending = Pending()
        dog = watchdog(members[0], file, ended, grace=0.1).start()
        members[1].report(Failure("raised", "boom in worker 1"))
        wait_until(lambda: ended)
        dog.stop()
        assert ended == [STUCK_EXIT_CODE]
        assert "boom in worker 1" in file.getvalue()


def test_when_the_watchdog_acts():
    policy = WaitPolicy(warn_after=5, every=30, deadline=100, grace=10)
    waits = Observation(waits_since=0.0)
    assert [policy.decide(waits, t) for t in (1, 5, 5.5, 6)] == [None, "show", None, "show"]
    policy.shown(6)
    assert [policy.decide(waits, t) for t in (7, 35, 36)] == [None, None, "show"]
    assert policy.decide(Observation(), 40) is None
    assert policy.decide(Observation(device_waits_since=40.0), 45) == "show", "a new wait begins anew"
    seen = [
        policy.decide(Observation(waits_since=0.0, device_waits_since=50.0), t) for t in (100, 101, 110)
    ]
    assert seen == ["give up", None, "give up"]
    failed = {"failed_since": 200.0}
    assert policy.decide(Observation(waits_since=1.0, **failed), 209) is None
    assert policy.decide(Observation(waits_since=1.0, **failed), 210) == "end"
    assert policy.decide(Observation(waits_since=1.0, is_idle=True, **failed), 203) is None
    assert policy.decide(Observation(waits_since=1.0, is_idle=True, **failed), 204) == "end", (
        "it only waits"
    )
    assert policy.decide(Observation(device_waits_since=1.0, **failed), 210) == "end"
    assert policy.decide(Observation(device_waits_since=1.0, told=True, **failed), 210) is None
    assert policy.decide(Observation(**failed), 999) is None
