"""Logs and snapshots: what was acknowledged is there again, wherever a log was cut."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import optax
import pytest

from phalanx import errors
from phalanx.parameter_server import durability, wire
from phalanx.parameter_server.commands import perform
from phalanx.parameter_server.durability import Durability, Keeper, default_folder, fresh_store
from phalanx.parameter_server.journal import Journal, read_journal
from phalanx.parameter_server.requests import OptimizerDefinition, Token, Update
from phalanx.parameter_server.snapshots import load_snapshot, records_of, write_snapshot
from phalanx.parameter_server.store import Store
from phalanx.parameter_server.updates import checked
from phalanx.parameter_server.wire import Kind
from tests.parameter_server.running import add, variable

V, TABLE = variable(0, (3,), "bfloat16"), variable(1, (5, 2))
SETUP = [
    wire.create(V, np.zeros(3, np.dtype("bfloat16"))),
    wire.create(TABLE, np.zeros((5, 2), np.float32)),
    wire.optimizer(OptimizerDefinition(1, cloudpickle.dumps(optax.adam(0.1)))),
]


def request(random: random.Random, number: int) -> list[Any]:
    """Something that a worker or the coordinator might ask for."""
    token = Token(random.randrange(12), random.randrange(2))
    rows = np.array([random.randrange(5) for _ in range(3)])
    updates = [
        [add(V)],
        [Update(TABLE, "scatter_add", np.full((3, 2), number), rows), add(V)],
        [Update(TABLE, "apply", np.ones((3, 2)), rows, 1)],
        [Update(V, "assign", np.full(3, number)), add(V)],
        [add(V), Update(V, "assign", np.full(3, number))],
    ][random.randrange(5)]
    updates = [checked(u) for u in updates]
    kinds: list[Any] = [
        wire.push(Kind.PUSH, token, updates, b"%d" % number),
        wire.push(Kind.STAGE, token, updates, b"%d" % number),
        wire.push(Kind.APPLY, token, updates),
        [wire.about(Kind.COMMIT, token)],
        [wire.about(Kind.DROP, token)],
        [wire.inquire([token])],
        [wire.decide([(token, number % 2 == 0)])],
        [wire.number(Kind.FORGET, number // 8)],
    ]
    chosen = kinds[random.choices(range(8), [6, 6, 1, 4, 1, 1, 2, 1])[0]]
    return [bytearray(memoryview(b)) for b in chosen]


def state(store: Store) -> Any:
    """Everything that matters of a store, to be compared."""
    return (
        {i: (h.definition, h.value.tobytes()) for i, h in store.variables.items()},
        {i: [x.tobytes() for x in h.slots[1].leaves] for i, h in store.variables.items() if h.slots},
        dict(store.applied),
        list(store.own.items()),
        dict(store.values),
        {closure: set(attempts) for closure, attempts in store.fences.items()},
        store.settled,
        sorted((t, [u.values.tobytes() for u in us], v) for t, (us, v) in store.staged.items()),
    )


def drive(keeper: Keeper, store: Store, seed: int, count: int = 60) -> list[tuple[int, Any]]:
    """Ask for many things; returns the size of the log and the state after each."""
    rng = random.Random(seed)
    history = []
    for number, buffers in enumerate([*SETUP, *(request(rng, i) for i in range(count))]):
        if perform(store, buffers).has_changed:
            keeper.note([bytes(memoryview(b)) for b in buffers])
        history.append((keeper.log_size, state(store)))
        if number == count // 2 and keeper.durability.limit < 0:
            keeper.snapshot(store).join(20)
    return history


def now(action: Any) -> None:
    action()


def resumed(folder: Path) -> Store:
    found = Keeper.resume(folder, now)
    assert found is not None
    keeper, store = found
    keeper.close()
    return store


@pytest.mark.parametrize("seed", range(3))
def test_a_log_gives_the_store_again_wherever_it_was_cut(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "run"
    keeper = Keeper.begin(folder, Durability("log"), now)
    history = drive(keeper, fresh_store(), seed)
    keeper.close()
    log = next(folder.glob("log-*"))
    whole = log.read_bytes()
    rng = random.Random(seed)
    for cut in [*(rng.randrange(1, len(whole)) for _ in range(12)), len(whole)]:
        log.write_bytes(whole[:cut])
        before = [found for size, found in history if size <= cut]
        expected = before[-1] if before else state(Store())
        assert state(resumed(folder)) == expected
        assert log.stat().st_size <= cut, "the torn record is gone"


def test_a_damaged_record_ends_a_log(tmp_path: Path) -> None:
    keeper = Keeper.begin(tmp_path / "run", Durability("log"), now)
    history = drive(keeper, fresh_store(), 0, 20)
    keeper.close()
    log = next((tmp_path / "run").glob("log-*"))
    data = bytearray(log.read_bytes())
    at = history[10][0] + 20
    data[at] ^= 1
    log.write_bytes(data)
    expected = [found for size, found in history if size <= at][-1]
    assert state(resumed(tmp_path / "run")) == expected


@pytest.mark.parametrize("seed", range(3))
def test_snapshots_shorten_the_log(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "run"
    keeper = Keeper.begin(folder, Durability("log", limit=-1), now)
    history = drive(keeper, fresh_store(), seed)
    keeper.close()
    assert sorted(p.name for p in folder.glob("*-*")) == ["log-00000001", "snapshot-00000001"]
    assert state(resumed(folder)) == history[-1][1]


def test_a_snapshot_that_is_not_finished_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keeper = Keeper.begin(folder, Durability("log", limit=-1), lambda action: None)  # never cleans up
    history = drive(keeper, fresh_store(), 0)
    keeper.close()
    (folder / "snapshot-00000001").rename(folder / "snapshot-00000001.new")
    assert state(resumed(folder)) == history[-1][1], "both logs are replayed"


def test_a_damaged_snapshot_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    store = Store()
    for buffers in SETUP:
        perform(store, buffers)
    write_snapshot(path, records_of(store))
    load_snapshot(path, Store())
    data = path.read_bytes()
    for damaged in (data[:-4], data[:-20], data[:40] + b"x" + data[41:]):
        path.write_bytes(damaged)
        with pytest.raises(errors.DataLossError):
            load_snapshot(path, Store())


def test_a_snapshot_is_of_one_moment(tmp_path: Path) -> None:
    store = Store()
    for buffers in SETUP:
        perform(store, buffers)
    sparse = [Update(TABLE, "apply", np.ones((1, 2), np.float32), np.array([2]), 1)]
    store.push(Token(0), sparse)
    before = state(store)
    records = records_of(store)
    store.push(Token(1), [*sparse, add(TABLE), add(V)])
    assert state(store) != before
    write_snapshot(tmp_path / "s", records)
    again = Store()
    load_snapshot(tmp_path / "s", again)
    assert state(again) == before


def test_snapshots_are_taken_when_it_is_time(tmp_path: Path) -> None:
    store = fresh_store()
    keeper = Keeper.begin(tmp_path / "run", Durability("snapshot", interval=0.0), now)
    keeper.take_care(store)
    keeper.close()
    assert Keeper.resume(tmp_path / "run", now) is None, "nothing had changed"
    keeper = Keeper.begin(tmp_path / "run", Durability("snapshot", interval=0.0), now)
    drive(keeper, store, 1, 10)
    keeper.take_care(store)
    keeper.close()
    assert state(resumed(tmp_path / "run")) == state(store)


@pytest.mark.parametrize("last", SETUP)
def test_what_is_new_is_in_a_snapshot_soon(tmp_path: Path, last: Any) -> None:
    folder, store = tmp_path / "run", fresh_store()
    keeper = Keeper.begin(folder, Durability("snapshot", interval=1000.0), now)
    for buffers in [*(x for x in SETUP if x is not last), last, [b"other"]]:
        if buffers != [b"other"]:
            perform(store, buffers)
        keeper.note(buffers)
        keeper.take_care(store)
        assert keeper._writer is None or keeper._writer.join(20) is None
    assert [p.name for p in folder.glob("snapshot-*")] == ["snapshot-00000003"]
    keeper.close()
    again = resumed(folder)
    assert (state(again), again.optimizers.keys()) == (state(store), store.optimizers.keys())


def test_a_log_is_kept_short(tmp_path: Path) -> None:
    store = fresh_store()
    keeper = Keeper.begin(tmp_path / "run", Durability("log", limit=100), now)
    drive(keeper, store, 1, 10)
    before = keeper.log_size
    keeper.take_care(store)
    assert keeper.log_size < before
    keeper.close()
    assert state(resumed(tmp_path / "run")) == state(store)
    assert resumed(tmp_path / "run").version != store.version


def test_a_journal_keeps_any_buffers(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "log")
    records = [[b"a", b"", bytes(5000)], [b""], [np.arange(4, dtype=np.uint8)] * 700]
    for record in records:
        journal.append(record)
    journal.sync()
    journal.close()
    found = list(read_journal(tmp_path / "log"))
    assert found == [[bytes(memoryview(b)) for b in record] for record in records]


def test_what_an_older_log_has_left_in_a_file_does_not_count(tmp_path: Path) -> None:
    older = Journal(tmp_path / "older")
    for i in range(8):
        older.append(
            [bytes([i]) * 1000]
        )  # all of the same size, so that records begin where others did
    older.close()
    journal = Journal(tmp_path / "log", tmp_path / "older")
    for i in range(3):
        journal.append([bytes([10 + i]) * 1000])
    assert not (tmp_path / "older").exists()
    assert (tmp_path / "log").stat().st_size > 8000, "it has the pages of the older one"
    shutil.copy(tmp_path / "log", tmp_path / "killed")  # as a process leaves it that dies now
    journal.close()
    for name in ("killed", "log"):
        assert [r[0][0] for r in read_journal(tmp_path / name)] == [10, 11, 12]
    assert (tmp_path / "killed").stat().st_size == (tmp_path / "log").stat().st_size


@pytest.mark.parametrize("at", [0, 4096, 70000, 131072 - 1, 131072 + 10])
def test_damage_in_large_buffers_is_noticed(tmp_path: Path, at: int) -> None:
    journal = Journal(tmp_path / "log")
    journal.append([b"small", np.arange(131072 // 4 + 8, dtype=np.int32).view(np.uint8)])
    size = journal.size
    journal.append([b"after"])
    journal.close()
    data = bytearray((tmp_path / "log").read_bytes())
    data[size - (131072 + 32) + at] ^= 4
    (tmp_path / "log").write_bytes(data)
    assert list(read_journal(tmp_path / "log")) == []


def test_logs_are_written_over_older_ones(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keeper = Keeper.begin(folder, Durability("log"), now)
    store = fresh_store()
    history = []
    for seed in range(4):
        history = drive(keeper, store, seed, 20)
        keeper.snapshot(store).join(20)
    history = drive(keeper, store, 9, 20)
    assert (folder / "spare").exists()
    assert state(resumed(folder)) == history[-1][1]  # though the process has not closed its log
    keeper.close()
    assert state(resumed(folder)) == history[-1][1]


def test_what_survives_the_machine_has_a_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is on the disk is lost all the same if its folder does not name it there."""
    on_disk: dict[str, set[str]] = {}  # what folders name, and files whose bytes are there
    for name in ("fsync", "fdatasync"):
        sync = getattr(os, name)

        def noted(file: int, sync: Any = sync) -> None:
            sync(file)
            path = os.readlink(f"/proc/self/fd/{file}")
            on_disk[path] = set(os.listdir(path)) if os.path.isdir(path) else set()

        monkeypatch.setattr(os, name, noted)
    folder = tmp_path / "servers" / "ps-1" / "run"
    keeper = Keeper.begin(folder, Durability("log", sync=True), now)
    store = fresh_store()
    for number in range(3):
        drive(keeper, store, number, 5)
        keeper.sync()
        logs = {f"log-{number:08d}"} | ({f"snapshot-{number:08d}"} if number else set())
        for path in (folder, *list(folder.parents)[:2]):
            assert path.name in on_disk[str(path.parent)]
        assert on_disk[str(folder)] >= {"run.json", *logs}
        assert on_disk.keys() >= {str(folder / name) for name in ("run.json", f"log-{number:08d}")}
        keeper.snapshot(store).join(20)
    keeper.close()


def test_a_log_goes_on_if_there_can_be_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    keeper = Keeper.begin(folder, Durability("log"), now)
    store = fresh_store()
    drive(keeper, store, 1, 5)

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durability, "Journal", full)
        with pytest.raises(OSError, match="No space left"):
            keeper.snapshot(store)
    drive(keeper, store, 2, 5)
    with open(folder / "log-00000000", "ab") as log:
        log.write(b"torn")  # as a process leaves it that dies
    assert state(resumed(folder)) == state(store)
    keeper.snapshot(store).join(20)
    drive(keeper, store, 3, 5)
    keeper.close()
    assert state(resumed(folder)) == state(store)


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "log")
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        os.dup2(full, journal._file)
        with pytest.raises(errors.DataLossError, match="No space left"):
            journal.append([b"a"])
    finally:
        os.close(full)
        os.close(journal._file)


def test_durability_has_three_kinds() -> None:
    with pytest.raises(errors.InvalidValueError, match="'none', 'snapshot', 'log'"):
        Durability("raid")


def test_servers_of_one_machine_keep_their_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_SERVER_FOLDER", "/data")
    assert default_folder("host:2222") == Path("/data/ps-2222")
    monkeypatch.delenv("PHALANX_SERVER_FOLDER")
    assert default_folder("host:1") != default_folder("host:2")
