"""Workers find together what they save, however unequal their programs are."""

from __future__ import annotations

import errno
import gc
import json
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px
from phalanx.train.checkpoints import directories, files, pairing
from phalanx.train.checkpoints.contents import Contents
from phalanx.train.checkpoints.files import Saved
from phalanx.train.checkpoints.options import CheckpointOptions
from phalanx.train.checkpoints.pairing import JointSave, judge, pairing_of
from phalanx.train.checkpoints.saving import Order, Saver

OWN = JointSave("/all/ckpt-2", 1, 5, is_counted=True)
WRITTEN = JointSave("/own-1", 1, 5)
ELSEWHERE = replace(OWN, path="/first/ckpt-2", is_done=True)


@pytest.mark.parametrize(
    ("own", "others", "is_quiet", "expected"),
    [
        (OWN, [], True, "wait"),
        (OWN, [ELSEWHERE], False, "wait"),
        (OWN, [ELSEWHERE], True, "alone"),
        (OWN, [replace(ELSEWHERE, place=4)], True, "wait"),  # of an earlier step
        (OWN, [replace(ELSEWHERE, is_done=False)], True, "wait"),
        (OWN, [replace(ELSEWHERE, place=6)], False, "alone"),  # the first worker has gone on
        (OWN, [replace(ELSEWHERE, needs_all=True, is_done=False)], False, "alone"),  # it waits there
        (OWN, [replace(ELSEWHERE, place=-1)], True, "alone"),  # of a thread that does not train
        (replace(OWN, place=-1), [replace(ELSEWHERE, place=6)], False, "wait"),
        (OWN, [replace(OWN, path="/all/ckpt-1")], True, "wait"),
        (OWN, [replace(OWN, path="/all/ckpt-3")], False, 0),
        (OWN, [replace(OWN, path="/all/ckpt-3"), ELSEWHERE], True, 0),
        (OWN, [replace(OWN, path="/all/ckpt-1"), ELSEWHERE], True, "wait"),
        (OWN, [replace(OWN, path="/all/ckpt-1"), replace(ELSEWHERE, place=6)], False, 1),
        (WRITTEN, [replace(WRITTEN, path="/own-0", is_done=True)], True, "alone"),
        (
            replace(WRITTEN, needs_all=True),
            [replace(WRITTEN, path="/own-0", is_done=True)],
            True,
            "wait",
        ),
        (replace(WRITTEN, needs_all=True), [replace(WRITTEN, path="/own-0", needs_all=True)], False, 0),
    ],
)
def test_what_the_first_worker_saves_in_its_place(
    own: JointSave, others: list[JointSave], is_quiet: bool, expected: int | str
) -> None:
    directories = {save.directory for save in others if save.is_counted}
    verdict = judge(own, others, directories, is_quiet)
    assert verdict == (others[expected] if isinstance(expected, int) else expected)


def test_who_has_written_alone_does_so_again_at_once() -> None:
    others = [replace(ELSEWHERE, is_done=False)]
    assert judge(OWN, others, {"/first"}, False, is_alone=True) == "alone"
    assert judge(OWN, others, {"/first", "/all"}, False, is_alone=True) == "wait"
    assert judge(OWN, [], {"/first"}, True, is_alone=True) == "wait"


# -- whole programs, with threads as workers -------------------------------------------------------


class Hub:
    """Passes on at once what is told."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.news: list[dict[tuple[str, int], Any]] = [{} for _ in range(size)]


class Status:
    def __init__(self) -> None:
        self.sequence, self.thread = 0, 0


class Member:
    """What a worker has of the hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.status = hub, rank, Status()

    def tell(self, name: str, value: Any = None) -> None:
        with self.hub.changed:
            for rank, news in enumerate(self.hub.news):
                if rank != self.rank:
                    news[name, self.rank] = json.loads(json.dumps(value))
            self.hub.changed.notify_all()

    def hear(self, name: str, ranks: Sequence[int], timeout: float) -> dict[int, Any]:
        news = self.hub.news[self.rank]
        with self.hub.changed:
            self.hub.changed.wait_for(lambda: all((name, rank) in news for rank in ranks), timeout)
            return {rank: news.pop((name, rank)) for rank in ranks if (name, rank) in news}

    def waiting(self, site: str) -> Any:
        return threading.Lock()  # a context manager


class Connection:
    def __init__(self, hub: Hub, rank: int) -> None:
        self.member, self.rank, self.size = Member(hub, rank), rank, len(hub.news)
        self.roster = [{"worker": f"worker {i}"} for i in range(self.size)]


@dataclass(frozen=True)
class Save:
    """A line of a program: who saves there, and what."""

    by: frozenset[int]
    name: str
    is_counted: bool = False
    needs_all: bool = False


STEP = "step"
GO = "a step for which no worker waits"
TWO = frozenset({0, 1})


class Job:
    """Two workers that run a program, until each has come to its end or to an error."""

    goes_on = False  # after errors

    def __init__(self, folder: Path) -> None:
        hub = Hub(2)
        self.folder, self.connections = folder, [Connection(hub, rank) for rank in range(2)]
        self.errors: list[BaseException | None] = [None, None]
        self.meeting = threading.Barrier(2)

    def run(self, program: Sequence[Save | str]) -> None:
        threads = [
            threading.Thread(target=self._worker, args=(rank, program), daemon=True) for rank in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "each wait has an end"

    def _worker(self, rank: int, program: Sequence[Save | str]) -> None:
        status = self.connections[rank].member.status
        status.thread = threading.get_ident()
        saver = Saver()
        try:
            for line in program:
                if isinstance(line, Save):
                    if rank in line.by:
                        self._save(rank, saver, line)
                    continue
                if line == STEP:
                    self.meeting.wait(60)
                status.sequence += 1
        except threading.BrokenBarrierError:
            pass  # the other worker has an error
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.errors[rank] = error
            self.meeting.abort()

    def _save(self, rank: int, saver: Saver, save: Save) -> None:
        connection: Any = self.connections[rank]
        place = connection.member.status.sequence
        contents = Contents(values={"place": place, "rank": rank})
        if save.needs_all:
            contents = Contents({}, {"place": place, "own": [rank, place]}, {"own"})
        path = self.folder / save.name
        joint = pairing_of(connection).begin(path, save.is_counted, save.needs_all)
        try:
            saver.save(Order(path, contents, CheckpointOptions(), connection, joint))
        except (OSError, px.PhalanxError) as error:
            if not self.goes_on:
                raise
            self.errors[rank] = error

    def saved(self) -> dict[str, dict[str, Any]]:
        """What is on the disk, by name."""
        found = [path.parent for path in self.folder.rglob("index.json")]
        return {str(path.relative_to(self.folder)): Saved(path).values for path in found}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_DEADLINE", "2")
    monkeypatch.setattr(pairing, "_QUIET", 0.5)
    monkeypatch.setattr(pairing, "_LOOK_EVERY", 0.01)


def numbered(lines: list[tuple[str, frozenset[int], bool]]) -> list[Save | str]:
    """A program whose counted checkpoints have the number of their line."""
    program: list[Save | str] = []
    for i, (name, by, needs_all) in enumerate(lines):
        if name == STEP:
            program.append(STEP)
        else:
            is_counted = name in ("all", "best")
            path = f"{name}/ckpt-{i}" if is_counted else name
            program.append(Save(by, path, is_counted, needs_all))
    return program


def lines(*kinds: Any) -> st.SearchStrategy[list[Save | str]]:
    step = st.tuples(st.just(STEP), st.just(TWO), st.just(False))
    return st.lists(st.one_of(step, *kinds), max_size=12).map(numbered)


def of(names: str, by: st.SearchStrategy[frozenset[int]], needs_all: Any) -> Any:
    return st.tuples(st.sampled_from(names.split()), by, needs_all)


BY_ALL, BY_FIRST = st.just(TWO), st.just(frozenset({0}))


@settings(max_examples=30, deadline=None)
@given(
    lines(
        of("all best whole", BY_ALL, st.booleans()),
        of("all best export", BY_FIRST, st.just(False)),
    )
)
def test_the_first_worker_may_save_more(program: list[Save | str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        job.run(program)
        assert job.errors == [None, None]
        expected: dict[str, dict[str, Any]] = {}
        place = 0
        for line in program:
            if not isinstance(line, Save):
                place += 1
            elif line.needs_all:
                expected[line.name] = {
                    "place": {"same": place},
                    "own": {"workers": [[0, place], [1, place]]},
                }
            else:
                expected[line.name] = {"place": {"same": place}, "rank": {"same": 0}}
        assert job.saved() == expected


@settings(max_examples=10, deadline=None)
@given(
    lines(
        of(
            "all best whole export",
            st.sampled_from([TWO, TWO, frozenset({0}), frozenset({1})]),
            st.booleans(),
        )
    )
)
def test_no_program_makes_a_wrong_checkpoint(program: list[Save | str]) -> None:
    """It ends everywhere, and parts of different moments are never put together."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        job.run(program)
        for error in job.errors:
            assert error is None or isinstance(error, px.PhalanxError)
            assert error is None or "worker" in str(error)
        for name, values in job.saved().items():
            if "own" in values:
                place = values["place"]["same"]
                assert values["own"] == {"workers": [[0, place], [1, place]]}, name
        assert not list(Path(folder).rglob("*.partial"))


def test_other_directories_of_other_workers_stay_apart(tmp_path: Path) -> None:
    both = [Save(frozenset({rank}), f"{rank}/ckpt-{i}", True) for i in (1, 2) for rank in (0, 1)]
    job = Job(tmp_path)
    job.run([both[0], both[1], STEP, both[2], both[3]])
    assert job.errors == [None, None]
    ranks = {name: values["rank"]["same"] for name, values in job.saved().items()}
    assert ranks == {"0/ckpt-1": 0, "1/ckpt-1": 1, "0/ckpt-2": 0, "1/ckpt-2": 1}


@pytest.mark.parametrize("needs_all", [False, True])
def test_who_does_not_save_is_named(needs_all: bool, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run([Save(frozenset({1}), "x/ckpt-1", True, needs_all)])
    assert job.errors[0] is None
    with pytest.raises(px.errors.DeadlineExceededError, match="worker 0 did not begin to save"):
        raise job.errors[1] or AssertionError
    assert not job.saved()


@pytest.mark.parametrize("needs_all", [False, True])
def test_a_worker_that_saved_too_much_goes_on(needs_all: bool, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.goes_on = True
    more = Save(frozenset({1}), "all/ckpt-7", True, needs_all)
    first, last = (Save(TWO, f"all/ckpt-{i}", True) for i in (1, 8))
    job.run([first, more, GO, last])
    assert job.errors[0] is None
    assert "all/ckpt-7', and worker 0 to " in str(job.errors[1])
    assert set(job.saved()) == {"all/ckpt-1", "all/ckpt-8"}
    job.errors[1] = None
    job.run([Save(TWO, "all/ckpt-9", True, True)])
    assert job.errors == [None, None]
    assert job.saved()["all/ckpt-9"]["own"] == {"workers": [[0, 1], [1, 1]]}


def test_what_was_saved_together_is_not_written_alone(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run([Save(TWO, "p"), STEP, Save(frozenset({0}), "q"), Save(frozenset({1}), "p")])
    assert job.errors[0] is None
    assert isinstance(job.errors[1], px.errors.DeadlineExceededError)
    assert f"and to '{tmp_path}/q' instead" in str(job.errors[1])
    assert job.saved()["p"]["place"] == {"same": 0}


def test_the_reason_of_the_first_worker_is_told_also_if_its_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs out of space before the other worker begins its part."""
    is_gone, discard, write_part = threading.Event(), directories.discard, files.write_part

    def discarded(partial: Path) -> None:
        discard(partial)
        is_gone.set()

    def written(partial: Path, rank: int, *args: Any) -> Any:
        if rank == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        assert is_gone.wait(60)
        return write_part(partial, rank, *args)

    monkeypatch.setattr(directories, "discard", discarded)
    monkeypatch.setattr(files, "write_part", written)
    job = Job(tmp_path)
    job.goes_on = True
    job.run([Save(TWO, "all/ckpt-1", True, needs_all=True)])
    assert isinstance(job.errors[0], OSError)
    assert isinstance(job.errors[1], px.errors.AbortedError)
    assert "No space left on device" in str(job.errors[1])


def test_a_directory_that_a_worker_does_not_see_is_named_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part = files.write_part

    def written(partial: Path, rank: int, *args: Any) -> Any:
        return write_part(partial / "elsewhere" if rank else partial, rank, *args)

    monkeypatch.setattr(files, "write_part", written)
    job = Job(tmp_path)
    job.run([Save(TWO, "all/ckpt-1", True, needs_all=True)])
    for error in job.errors:
        assert isinstance(error, px.errors.AbortedError)
        assert "worker 1 does not see the directory of the checkpoint" in str(error)


def test_a_job_that_is_over_is_forgotten() -> None:
    connection: Any = Connection(Hub(2), 0)
    pairing_of(connection).begin(Path("/x"), False, False)
    member = weakref.ref(connection.member)
    del connection
    gc.collect()
    assert member() is None
