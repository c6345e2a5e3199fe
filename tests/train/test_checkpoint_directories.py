"""What managers and saves do to directories that others use too."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from tests.processes import wait_until

import phalanx as px
from phalanx.train.checkpoints import directories, files, saving, state
from phalanx.train.checkpoints.saving_again import save_surely
from phalanx.train.checkpoints.state import DirectoryState, change_state, read_state

Manager = px.train.CheckpointManager
HOUR = 3600.0
IN_BACKGROUND = px.train.CheckpointOptions(enable_async=True)


def counting() -> tuple[px.Variable, px.train.Checkpoint]:
    v = px.Variable(0)
    return v, px.train.Checkpoint(v=v)


def folders(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.is_dir())


def names(paths: list[str]) -> list[str]:
    return [Path(path).name for path in paths]


# -- what is there already ---------------------------------------------------------------------------


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    _, checkpoint = counting()
    results, run = tmp_path / "results.csv", tmp_path / "run"
    results.write_text("1,2\n")
    (run / "more").mkdir(parents=True)
    (run / "notes.txt").write_text("keep")
    saved = checkpoint.write(str(tmp_path / "saved"))
    link = tmp_path / "link"
    link.symlink_to(saved)
    manager = Manager(checkpoint, str(tmp_path / "all"), 3)
    manager.save()
    for path in (results, run, link, tmp_path / "all"):
        for write in (checkpoint.write, lambda to: px.train.convert_checkpoint(saved, to, "phalanx")):
            with pytest.raises(px.errors.AlreadyExistsError, match=f"something else.*{path.name}"):
                write(str(path))
    assert results.read_text() == "1,2\n"
    assert (run / "notes.txt").read_text() == "keep"
    assert link.is_symlink()
    assert folders(tmp_path / "all") == ["ckpt-1"]
    assert not list(tmp_path.glob(".*"))


def test_what_comes_while_a_checkpoint_is_written_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoint = counting()
    path, write_index = tmp_path / "a", files.write_index

    def meanwhile(*args: Any) -> Any:
        path.write_text("of another program")
        return write_index(*args)

    monkeypatch.setattr(files, "write_index", meanwhile)
    with pytest.raises(px.errors.AlreadyExistsError):
        checkpoint.write(str(path))
    assert path.read_text() == "of another program"
    assert os.listdir(tmp_path) == ["a"]


def test_a_checkpoint_also_a_damaged_one_or_an_empty_directory_is_overwritten(tmp_path: Path) -> None:
    v, checkpoint = counting()
    (tmp_path / "empty").mkdir()
    for name in ("empty", "whole", "damaged"):
        path = tmp_path / name
        for value in (1, 2):
            if name == "damaged" and value == 2:
                (path / "index.json").unlink()
            v.assign(value)
            checkpoint.write(str(path))
        assert px.train.load_variable(str(path), "v") == 2


# -- several managers --------------------------------------------------------------------------------


def test_managers_of_one_directory_leave_each_other_alone(tmp_path: Path) -> None:
    """The newest ones and the best one in one directory, also after a restart."""
    v, checkpoint = counting()
    for restart in range(2):
        newest = Manager(checkpoint, str(tmp_path), 2)
        best = Manager(checkpoint, str(tmp_path), 1, checkpoint_name="best")
        for i in range(3):
            v.assign(10 * restart + i)
            if i == 0:
                best.save(checkpoint_number=restart)
            newest.save(checkpoint_number=10 * restart + i)
    assert folders(tmp_path) == ["best-1", "ckpt-11", "ckpt-12"]
    assert names(newest.checkpoints) == ["ckpt-11", "ckpt-12"]
    for manager, value in (
        (Manager(checkpoint, str(tmp_path), 1, checkpoint_name="best"), 10),
        (Manager(checkpoint, str(tmp_path), 1), 12),
    ):
        manager.restore_or_initialize()
        assert int(v) == value
    assert px.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-12")
    Manager(checkpoint, str(tmp_path), 1, checkpoint_name="best").save(checkpoint_number=7)
    assert px.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "best-7")
    assert set(read_state(tmp_path).names) == {"ckpt-11", "ckpt-12", "best-7"}


def test_a_save_beside_a_manager_is_the_latest_and_forgets_none(tmp_path: Path) -> None:
    """A program goes back to an older checkpoint, and saves without the manager."""
    v, checkpoint = counting()
    manager = Manager(checkpoint, str(tmp_path), None)
    for i in range(4):
        v.assign(i)
        manager.save()
    checkpoint.restore(str(tmp_path / "ckpt-2"))
    path = checkpoint.save(str(tmp_path / "ckpt"))
    assert Path(path).name == "ckpt-3"
    again = Manager(checkpoint, str(tmp_path), 2)
    assert again.latest_checkpoint == px.train.latest_checkpoint(str(tmp_path)) == path
    assert names(again.checkpoints) == ["ckpt-1", "ckpt-2", "ckpt-4", "ckpt-3"]
    again.save()
    assert folders(tmp_path) == ["ckpt-3", "ckpt-4"]


def test_two_processes_that_save_at_once_both_count(tmp_path: Path) -> None:
    """Each writes the names of the other into the directory's file."""

    def add(name: str) -> None:
        for i in range(20):
            change_state(tmp_path, lambda x, i=i: DirectoryState((*x.names, f"{name}-{i}")))

    threads = [threading.Thread(target=add, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_state(tmp_path).names) == 40


def test_a_lock_that_is_held_for_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that is frozen while it has the lock keeps none from saving."""
    _, checkpoint = counting()
    monkeypatch.setattr(state, "_LOCKED", 0.0)
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        path = checkpoint.save(str(tmp_path / "ckpt"))
    finally:
        os.close(held)
    assert f"Another process has held the lock of {tmp_path}" in caplog.text
    assert px.train.latest_checkpoint(str(tmp_path)) == path
    caplog.clear()
    checkpoint.save(str(tmp_path / "ckpt"))
    assert not caplog.text


def test_a_lock_ends_also_where_another_process_has_the_same_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was forked meanwhile, by a loader of data say, keeps it open."""
    kept: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(state.os, "close", kept.append)
        change_state(tmp_path, lambda now: now)
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        for descriptor in (other, *kept):
            os.close(descriptor)


# -- what stays for good -----------------------------------------------------------------------------


def hourly(place: Path, now: list[float], hours: float | None = 1) -> px.train.CheckpointManager:
    made = Manager(counting()[1], str(place), 1, hours, clock=lambda: now[0])
    made.restore_or_initialize()
    return made


def save_at(manager: px.train.CheckpointManager, now: list[float], *hours: float) -> None:
    for hour in hours:
        now[0] = hour * HOUR
        manager.save()


def test_a_manager_without_hours_leaves_what_stays_for_good(tmp_path: Path) -> None:
    now = [0.0]
    save_at(hourly(tmp_path, now), now, 1, 2, 3, 4)
    save_at(hourly(tmp_path, now, hours=None), now, 5, 6)
    assert folders(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3", "ckpt-6"]
    save_at(hourly(tmp_path, now), now, 7, 8)
    assert folders(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3", "ckpt-6", "ckpt-7", "ckpt-8"]


def test_a_clock_that_was_ahead_hides_nothing(tmp_path: Path) -> None:
    now = [1000 * HOUR]
    save_at(hourly(tmp_path, now), now, 1001, 1002, 1003)
    now[0] = 1.0
    manager = hourly(tmp_path, now)
    save_at(manager, now, 1, 2, 3, 4)
    again = hourly(tmp_path, now)
    assert again.latest_checkpoint == str(tmp_path / "ckpt-7")
    assert names(again.checkpoints) == ["ckpt-7"]
    assert "ckpt-4" not in folders(tmp_path)  # hours count from it
    assert len(folders(tmp_path)) == 6


def test_hours_that_come_later_do_not_keep_all_that_is_there(tmp_path: Path) -> None:
    now = [0.0]
    kept = Manager(counting()[1], str(tmp_path), 4, clock=lambda: now[0])
    save_at(kept, now, 0.1, 0.2, 0.3, 0.4)
    save_at(hourly(tmp_path, now), now, 0.5)
    save_at(hourly(tmp_path, now), now, 0.6)
    assert folders(tmp_path) == ["ckpt-6"]


# -- in the background -------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, threading
import phalanx as px
from phalanx.train.checkpoints import directories, files

gate, commit = threading.Event(), files.commit

def held(*args):
    gate.wait()
    return commit(*args)

manager = px.train.CheckpointManager(px.train.Checkpoint(v=px.Variable(0)), sys.argv[1], 1)
manager.save()
files.commit = held
manager.save(options=px.train.CheckpointOptions(enable_async=True))
saver = manager.checkpoint._saver
bell, actions = saver._bell, [lambda: os.kill(os.getpid(), signal.SIGINT), gate.set]

class Bell:
    ring = bell.ring

    def wait(self, seconds):
        actions.pop(0)() if actions else None
        return bell.wait(seconds)

saver._bell = Bell()
try:
    manager.sync()
except KeyboardInterrupt:
    print("interrupted", manager.checkpoint.is_saving, flush=True)
if sys.argv[2] == "go on":
    manager.save()
    print([path.rpartition("/")[2] for path in manager.checkpoints])
else:
    threading.Thread(target=lambda: (threading.main_thread().join(), gate.set())).start()
"""


@pytest.mark.parametrize("then", ["go on", "end"])
def test_ctrl_c_while_a_program_waits_for_a_checkpoint_loses_nothing(tmp_path: Path, then: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = "interrupted True\n" + ("['ckpt-3']\n" if then == "go on" else "")
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    assert folders(tmp_path) == (["ckpt-3"] if then == "go on" else ["ckpt-2"])


def test_a_save_whose_thread_does_not_start_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v, checkpoint = counting()

    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            checkpoint.write(str(tmp_path / "x"), IN_BACKGROUND)
    assert not checkpoint.is_saving
    v.assign(5)
    path = checkpoint.write(str(tmp_path / "x"), IN_BACKGROUND)
    checkpoint.sync()
    assert px.train.load_variable(path, "v") == 5


def test_a_save_that_a_program_waits_for_begins_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it leaves the processors to the next step for a moment."""
    _, checkpoint = counting()
    monkeypatch.setattr(saving, "_PAUSE_PER_BYTE", 1e6)
    monkeypatch.setattr(saving, "_LONGEST_PAUSE", 1e6)
    checkpoint.write(str(tmp_path / "x"), IN_BACKGROUND)
    thread = threading.Thread(target=checkpoint.sync, daemon=True)
    thread.start()
    try:
        thread.join(20)
        assert not thread.is_alive()
    finally:
        checkpoint._saver._hurry.ring()
    assert folders(tmp_path) == ["x"]


def test_all_threads_that_wait_for_a_save_see_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoint = counting()
    gate, begin = threading.Event(), directories.begin

    def held(path: Path) -> Path:
        gate.wait(60)
        return begin(path)

    monkeypatch.setattr(directories, "begin", held)
    checkpoint.write(str(tmp_path / "x"), IN_BACKGROUND)
    threads = [threading.Thread(target=checkpoint.sync) for _ in range(3)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_save_that_is_under_way_counts_when_the_newest_is_restored(tmp_path: Path) -> None:
    v, checkpoint = counting()
    begun: list[int] = []
    manager = Manager(checkpoint, str(tmp_path), 1, init_fn=lambda: begun.append(1))
    for value in (1, 2):
        v.assign(value)
        path = manager.save(options=IN_BACKGROUND)
        v.assign(100)
        assert manager.restore_or_initialize() == path
        assert int(v) == value
    assert begun == []


def test_a_relative_directory_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    _, checkpoint = counting()
    manager = Manager(checkpoint, "all", 1)
    gate, begin = threading.Event(), directories.begin

    def held(path: Path) -> Path:
        gate.wait(60)
        return begin(path)

    monkeypatch.setattr(directories, "begin", held)
    for save in (
        lambda: checkpoint.save("one", IN_BACKGROUND),
        lambda: manager.save(options=IN_BACKGROUND),
    ):
        gate.clear()
        path = save()
        assert path is not None
        assert not os.path.isabs(path)
        monkeypatch.chdir(tmp_path / "elsewhere")
        gate.set()
        checkpoint.sync()
        monkeypatch.chdir(tmp_path)
        assert directories.is_checkpoint(Path(path))
    assert os.listdir("elsewhere") == []
    assert manager.latest_checkpoint == px.train.latest_checkpoint("all") == "all/ckpt-2"


def test_a_save_that_failed_does_not_count_for_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, checkpoint = counting()
    manager = Manager(checkpoint, str(tmp_path), 1, step_counter=step, checkpoint_interval=10)
    with monkeypatch.context() as patch:
        patch.setattr(files, "commit", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        assert manager.save(options=IN_BACKGROUND) is not None
        step.assign(1)
        wait_until(lambda: not manager.checkpoint.is_saving)
        with pytest.raises(OSError, match="no space"):  # it is not due, but it says what went wrong
            manager.save()
    assert manager.save() is not None
    step.assign(5)
    assert manager.save() is None


def test_a_callback_may_wait_for_its_own_checkpoint(tmp_path: Path) -> None:
    _, checkpoint = counting()
    done: list[str] = []

    def written(path: str) -> None:
        checkpoint.sync()
        done.append(Path(path).name)

    options = px.train.CheckpointOptions(experimental_write_callbacks=[written], enable_async=True)
    checkpoint.save(str(tmp_path / "ckpt"), options)
    checkpoint.sync()
    assert done == ["ckpt-1"]


# -- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run[1]", 'a "b" \\ c', "two\nlines", "ü*?"])
def test_strange_names_are_found_again(tmp_path: Path, name: str) -> None:
    v, checkpoint = counting()
    manager = Manager(checkpoint, str(tmp_path), 2, checkpoint_name=name)
    for i in range(3):
        v.assign(i)
        manager.save()
    latest = str(tmp_path / f"{name}-3")
    assert px.train.latest_checkpoint(str(tmp_path)) == latest
    (tmp_path / "checkpoint").unlink()
    again = Manager(checkpoint, str(tmp_path), 2, checkpoint_name=name)
    assert (again.latest_checkpoint, len(again.checkpoints)) == (latest, 2)


def test_a_prefix_that_is_a_directory_saves_into_it(tmp_path: Path) -> None:
    _, checkpoint = counting()
    path = checkpoint.save(f"{tmp_path}/run/")
    assert Path(path) == tmp_path / "run" / "-1"
    assert px.train.latest_checkpoint(f"{tmp_path}/run") == path


# -- leftovers ---------------------------------------------------------------------------------------


def test_leftovers_of_other_lives_and_machines(tmp_path: Path) -> None:
    own, pid = directories.machine(), os.getpid()
    alive = subprocess.Popen(["sleep", "1000"])
    try:
        stays = [f".a@{own}@{alive.pid}@0.partial", ".a@elsewhere@1@0.partial"]
        goes = [f".a@{own}@{pid}@0.partial", f".a@{own}@{2**22 - 1}@0.partial", ".a@gone@1@1.partial"]
        for name in (*stays, *goes):
            (tmp_path / name).mkdir()
            (tmp_path / name / "arrays-00000").write_text("")
        mine = directories.begin(tmp_path / "a")
        old = time.time() - 2 * 86400
        for path in (tmp_path / goes[-1] / "arrays-00000", tmp_path / goes[-1]):
            os.utime(path, (old, old))
        directories.remove_leftovers(tmp_path)
        assert sorted(os.listdir(tmp_path)) == sorted([*stays, mine.name])
    finally:
        alive.send_signal(signal.SIGKILL)
        alive.wait()


def test_what_a_container_with_the_same_name_writes_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of its processes are not those that this one sees."""
    stat = os.stat

    def of_container(path: Any, *args: Any, **how: Any) -> Any:
        return (
            types.SimpleNamespace(st_ino=7) if path == "/proc/self/ns/pid" else stat(path, *args, **how)
        )

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", of_container)
        patch.setattr(os, "getpid", lambda: 2**22 - 1)
        patch.setattr(directories, "_begun", set())
        theirs = directories.begin(tmp_path / "a")
    directories.remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [theirs.name]


def test_a_worker_that_still_writes_does_not_keep_what_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker gives up a checkpoint at the moment in which another one begins its part."""
    partial, rmdir = directories.begin(tmp_path / "a"), os.rmdir

    def meanwhile(*args: Any, **how: Any) -> None:
        with contextlib.suppress(FileNotFoundError):  # which the other worker is told
            (partial / "arrays-00001").write_text("")
        rmdir(*args, **how)

    (partial / "arrays-00000").write_text("")
    monkeypatch.setattr(os, "rmdir", meanwhile)
    directories.discard(partial)
    assert os.listdir(tmp_path) == []


def test_a_save_that_is_needed_is_not_made_again_when_it_is_there(tmp_path: Path) -> None:
    """Other workers do not know that a callback has failed here, and would not save with this one."""
    _, checkpoint = counting()
    manager = Manager(checkpoint, str(tmp_path), max_to_keep=None)

    def failing() -> None:
        raise OSError("the bucket is full")

    options = px.train.CheckpointOptions(experimental_write_callbacks=[failing])
    with pytest.raises(OSError, match="the bucket is full"):
        save_surely(manager, None, lambda: manager.save(options=options))
    assert folders(tmp_path) == ["ckpt-1"]
