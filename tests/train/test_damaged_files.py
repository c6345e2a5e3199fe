"""Damage in files that other tools read: it is named, and never loaded."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import phalanx as px
from phalanx.train.checkpoints import files
from phalanx.train.checkpoints.checkpoint import open_checkpoint

STATE = "checkpoint"


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def damages(data: bytes, count: int) -> list[bytes]:
    random = np.random.default_rng(0)
    cut = [data[: random.integers(len(data))] for _ in range(count // 3)]
    places = zip(random.integers(len(data), size=count), random.integers(8, size=count), strict=True)
    return [*cut, *(flipped(data, int(at), int(bit)) for at, bit in places)]


def never_loaded(load: Callable[[], Any], w: px.Variable, wanted: Any) -> str:
    """What a load says about damage; if nothing, it has given the right values."""
    w.assign(np.full(w.shape, -1.0, np.float32))
    try:
        load()
    except px.errors.DataLossError as error:
        assert float(w[0]) == -1.0
        return str(error)
    np.testing.assert_array_equal(w, wanted)
    return ""


def test_a_checkpoint_that_cannot_be_read_for_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program ends, say because it has too many open files, and is started again."""
    v = px.Variable(0.0)
    manager = px.train.CheckpointManager(px.train.Checkpoint(v=v), str(tmp_path), max_to_keep=2)
    for number in (1.0, 2.0):
        v.assign(number)
        manager.save()

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", refused, raising=False)
        with pytest.raises(OSError, match="Too many open files"):
            manager.restore_or_initialize()
    v.assign(3.0)
    manager.save()
    assert [Path(path).name for path in manager.checkpoints] == ["ckpt-2", "ckpt-3"]


def test_files_of_weights(tmp_path: Path) -> None:
    wanted = np.arange(50, dtype=np.float32)
    w = px.Variable(wanted)
    path = tmp_path / "x.safetensors"
    px.train.export_weights(str(path), {"w": w})
    good = path.read_bytes()
    said = []
    for data in damages(good, 30):
        path.write_bytes(data)
        said.append(never_loaded(lambda: px.train.load_weights(str(path), {"w": w}), w, wanted))
    assert sum(map(bool, said)) > 30, said
    path.write_bytes(flipped(good, len(good) - 3))
    with pytest.raises(
        px.errors.DataLossError, match=r"array 'w' of a file is damaged.*x\.safetensors"
    ):
        px.train.load_weights(str(path), {"w": w})


# When a read fails, Orbax ends its event loop. Other reads of tensorstore, which end later, complain.
@pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")
def test_checkpoints_of_orbax(tmp_path: Path) -> None:
    wanted = np.random.default_rng(0).normal(size=500).astype(np.float32)
    w = px.Variable(wanted)
    checkpoint = px.train.Checkpoint(w=w, n=[3])
    path = Path(checkpoint.write(str(tmp_path / "x"), px.train.CheckpointOptions(format="orbax")))
    files = sorted((x for x in path.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)
    values, largest = path / "values" / "metadata", files[-1]
    for file, count in ((values, 9), (largest, 6)):
        good = file.read_bytes()
        said = []
        for data in damages(good, count):
            file.write_bytes(data)
            said.append(never_loaded(lambda: checkpoint.restore(str(path)), w, wanted))
            assert checkpoint.n == [3]
        file.write_bytes(good)
        assert sum(map(bool, said)) >= count, said
        assert any("'w'" in x if file is largest else "'values'" in x for x in said), said
    assert px.train.load_checkpoint(str(path)).verify() is None
    shutil.rmtree(path / "default")
    with ocp.StandardCheckpointer() as writer:  # another program has put other arrays there
        writer.save(path / "default", {"other": wanted})
    with pytest.raises(px.errors.DataLossError, match=r"'save_counter'.*missing"):
        checkpoint.restore(str(path))


def test_checkpoints_of_orbax_that_differ_are_told_apart(tmp_path: Path) -> None:
    """Workers compare these numbers, so that all restore the same checkpoint."""
    w = px.Variable(1.0)
    digests = []
    for i in range(2):
        w.assign(float(i))
        path = px.train.Checkpoint(w=w).write(
            str(tmp_path / str(i)), px.train.CheckpointOptions(format="orbax")
        )
        digests += [open_checkpoint(Path(path)).digest for _ in range(2)]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def test_the_file_that_names_the_latest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    v = px.Variable(0)
    checkpoint = px.train.Checkpoint(v=v)
    manager = px.train.CheckpointManager(checkpoint, str(tmp_path), 2)
    for i in range(12):
        v.assign(i)
        manager.save()
    wanted = [str(tmp_path / f"ckpt-{i}") for i in (11, 12)]
    good = (tmp_path / STATE).read_bytes()
    warned = 0
    for data in [b"", b"\xff\xfe", *damages(good, 60)]:
        (tmp_path / STATE).write_bytes(data)
        caplog.clear()
        assert px.train.latest_checkpoint(str(tmp_path)) == wanted[-1], data
        assert px.train.CheckpointManager(checkpoint, str(tmp_path), 2).checkpoints == wanted, data
        warned += "is damaged" in caplog.text
    assert warned > 55
    again = px.train.CheckpointManager(checkpoint, str(tmp_path), 2)
    assert again.restore_or_initialize() == wanted[-1]
    assert again.save() == str(tmp_path / "ckpt-13")
    caplog.clear()
    assert px.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-13")
    assert caplog.text == ""


def test_what_stays_for_good_stays_also_if_the_file_is_damaged(tmp_path: Path) -> None:
    now = [0.0]
    checkpoint = px.train.Checkpoint(v=px.Variable(0))

    def manager() -> px.train.CheckpointManager:
        return px.train.CheckpointManager(
            checkpoint, str(tmp_path), 1, keep_checkpoint_every_n_hours=1, clock=lambda: now[0]
        )

    first = manager()
    for i in range(4):
        now[0] = 3700.0 * (i + 1)
        first.save()
    there = sorted(x.name for x in tmp_path.iterdir() if x.is_dir())
    for i, name in enumerate(there):
        os.utime(tmp_path / name, (3700.0 * (i + 1),) * 2)
    (tmp_path / STATE).write_bytes(b"")
    now[0] += 60.0
    manager().save()
    assert sorted(x.name for x in tmp_path.iterdir() if x.is_dir()) == [*there, "ckpt-5"]


def test_the_last_good_one_stays_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    v = px.Variable(0)

    def manager() -> px.train.CheckpointManager:
        return px.train.CheckpointManager(px.train.Checkpoint(v=v), str(tmp_path), 2)

    first = manager()
    for i in (1, 2):
        v.assign(i)
        first.save(checkpoint_number=10 * i)
    (tmp_path / "ckpt-20" / "arrays-00000").write_bytes(b"")
    again = manager()
    assert again.restore_or_initialize() == str(tmp_path / "ckpt-10")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):  # a save that fails removes nothing
        again.checkpoint.write(str(tmp_path / "file" / "x"))
    assert manager().restore_or_initialize() == str(tmp_path / "ckpt-10")
    v.assign(3)
    again.save(checkpoint_number=25)
    assert sorted(x.name for x in tmp_path.glob("ckpt-*")) == ["ckpt-10", "ckpt-25"]
    assert manager().restore_or_initialize() == str(tmp_path / "ckpt-25")
    assert int(v) == 3


def test_a_checkpoint_without_its_index_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    v, begun = px.Variable(0), []

    def manager() -> px.train.CheckpointManager:
        checkpoint = px.train.Checkpoint(v=v)
        return px.train.CheckpointManager(checkpoint, str(tmp_path), 2, init_fn=lambda: begun.append(1))

    first = manager()
    for _ in range(2):
        first.save()
    (tmp_path / "ckpt-2" / "index.json").unlink()
    assert manager().restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert "ckpt-2 is damaged and is not restored: it has no index" in caplog.text
    (tmp_path / "ckpt-1" / "index.json").rename(tmp_path / "aside")
    last = manager()
    with pytest.raises(px.errors.DataLossError, match=r"no whole checkpoint.*ckpt-2.*no index"):
        last.restore_or_initialize()
    (tmp_path / "aside").rename(tmp_path / "ckpt-1" / "index.json")
    last.save(checkpoint_number=2)
    caplog.clear()
    assert last.restore_or_initialize() == str(tmp_path / "ckpt-2")
    assert not caplog.text
    for left in tmp_path.glob("ckpt-*"):
        (left / "index.json").unlink()
    with pytest.raises(px.errors.DataLossError, match="no whole checkpoint"):
        manager().restore_or_initialize()
    assert not begun
    for left in tmp_path.glob("ckpt-*"):
        shutil.rmtree(left)
    assert manager().restore_or_initialize() is None
    assert begun


@pytest.mark.parametrize("damage", ["index", "array"])
def test_one_that_stays_for_good_is_restored_if_no_other_is_whole(tmp_path: Path, damage: str) -> None:
    v, now = px.Variable(0), [0.0]

    def manager() -> px.train.CheckpointManager:
        checkpoint = px.train.Checkpoint(v=v)
        return px.train.CheckpointManager(checkpoint, str(tmp_path), 1, 1.0, clock=lambda: now[0])

    first = manager()
    for number in range(3):
        v.assign(number)
        now[0] += 7200.0
        first.save()
    newest = tmp_path / "ckpt-3"
    for file in newest.iterdir():
        if (file.name == "index.json") == (damage == "index"):
            file.unlink()
    again = manager()
    assert again.restore_or_initialize() == str(tmp_path / "ckpt-2")
    assert int(v) == 1
    again.save()
    assert {x.name for x in tmp_path.glob("ckpt-*")} == {"ckpt-1", "ckpt-2", "ckpt-3"}
    assert manager().restore_or_initialize() == str(newest)


def test_a_file_that_cannot_be_read_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    v = px.Variable(0)
    manager = px.train.CheckpointManager(px.train.Checkpoint(v=v), str(tmp_path), 3)
    for i in (1, 2):
        v.assign(i)
        manager.save()
    file = tmp_path / "ckpt-2" / "arrays-00000"
    file.unlink()
    file.mkdir()
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert int(v) == 1
    assert "the file 'arrays-00000' cannot be read (Is a directory)" in caplog.text


def test_a_damaged_one_does_not_stay_for_good(tmp_path: Path) -> None:
    """It goes before those that are whole, also if it was its turn to be kept."""
    v, now = px.Variable(0), [0.0]

    def manager() -> px.train.CheckpointManager:
        checkpoint = px.train.Checkpoint(v=v)
        return px.train.CheckpointManager(checkpoint, str(tmp_path), 3, 1.0, clock=lambda: now[0])

    first = manager()
    for number, hours in ((10, 0.5), (20, 1.2), (30, 2.0)):
        now[0] = hours * 3600.0
        first.save(checkpoint_number=number)
    (tmp_path / "ckpt-30" / "arrays-00000").write_bytes(b"")
    again = manager()
    assert again.restore_or_initialize() == str(tmp_path / "ckpt-20")
    now[0] = 3.0 * 3600.0
    again.save(checkpoint_number=40)
    assert {x.name for x in tmp_path.glob("ckpt-*")} == {"ckpt-10", "ckpt-20", "ckpt-40"}
