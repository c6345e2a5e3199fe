"""Checkpoints: what is saved comes back, and nothing is ever half written."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import phalanx as px
from phalanx.core.regions import Flat
from phalanx.core.variables.variable_parts import Part
from phalanx.train.checkpoints import directories, files
from phalanx.train.checkpoints.directories import begin
from phalanx.train.checkpoints.files import ArraySource, Saved, commit, write_part


def write(path: Path, arrays: dict[str, ArraySource], values: dict[str, Any]) -> None:
    partial = begin(path)
    commit(partial, path, [write_part(partial, 0, arrays, values)])


ON_READ, SUM = px.VariableSynchronization.ON_READ, px.VariableAggregation.SUM


class Model:
    """An object with variables in attributes."""

    def __init__(self) -> None:
        self.w = px.Variable([1.0, 2.0])
        self.layers = [px.Variable(3), {"b": px.Variable(True)}]
        self.name = "no variable"
        self.itself = self


def test_everything_comes_back(tmp_path: Path) -> None:
    model, step = Model(), px.Variable(5)
    optimizer = px.train.Optimizer(optax.adam(0.1))
    optimizer.build([model.w])
    optimizer.iterations.assign(9)
    checkpoint = px.train.Checkpoint(model=model, optimizer=optimizer, step=step)
    path = checkpoint.save(str(tmp_path / "ckpt"))
    assert path == str(tmp_path / "ckpt-1")
    assert [name for name, _ in px.train.list_variables(path)] == [
        "model/layers/0",
        "model/layers/1/b",
        "model/w",
        *(f"optimizer/{i}" for i in range(len(optimizer.variables))),
        "save_counter",
        "step",
    ]
    model.w.assign([0.0, 0.0])
    model.layers[0].assign(0)  # type: ignore[union-attr]
    optimizer.iterations.assign(0)
    step.assign(0)
    assert checkpoint.restore(path).assert_consumed().expect_partial().missing == []
    assert model.w.numpy().tolist() == [1.0, 2.0]
    assert int(model.layers[0]) == 3  # type: ignore[call-overload]
    assert (int(optimizer.iterations), int(step), int(checkpoint.save_counter)) == (9, 5, 1)
    assert checkpoint.step is step


def test_another_strategy_takes_it(tmp_path: Path) -> None:
    mirrored = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with mirrored.scope():
        v = px.Variable([1.0, 2.0])
        s = px.Variable(3.0, synchronization=ON_READ, aggregation=SUM)
    path = px.train.Checkpoint(v=v, s=s).write(str(tmp_path / "x"))
    w, t = px.Variable([0.0, 0.0]), px.Variable(0.0)
    px.train.Checkpoint(v=w, s=t).read(path)
    assert (w.numpy().tolist(), float(t)) == ([1.0, 2.0], float(s))
    v.assign([5.0, 5.0])
    px.train.Checkpoint(v=v, s=s).restore(path).assert_existing_objects_matched()
    assert v.numpy().tolist() == [1.0, 2.0]


def test_positions_of_iterators(tmp_path: Path) -> None:
    dataset = px.data.Dataset.range(10)
    iterator = iter(dataset)
    for _ in range(4):
        next(iterator)
    checkpoint = px.train.Checkpoint(data=iterator)
    path = checkpoint.save(str(tmp_path / "ckpt"))
    assert int(next(iterator)) == 4
    next(iterator)
    checkpoint.restore(path)
    assert int(next(iterator)) == 4


def test_what_is_missing_and_what_is_left(tmp_path: Path) -> None:
    a, b = px.Variable(1.0), px.Variable(2.0)
    path = px.train.Checkpoint(a=a).write(str(tmp_path / "x"))
    status = px.train.Checkpoint(a=a, b=b).restore(path)
    with pytest.raises(AssertionError, match=r"\['b'\]"):
        status.assert_existing_objects_matched()
    path = px.train.Checkpoint(a=a, b=b).write(str(tmp_path / "y"))
    status = px.train.Checkpoint(b=b).restore(path)
    status.assert_existing_objects_matched()
    with pytest.raises(AssertionError, match=r"\['a'\]"):
        status.assert_consumed()
    with pytest.raises(AssertionError, match="no name in common"):
        px.train.Checkpoint(c=a).restore(path).assert_nontrivial_match()
    nothing = px.train.Checkpoint(a=a).restore(None).expect_partial()
    assert nothing.missing == ["a"]
    for check in (
        nothing.assert_consumed,
        nothing.assert_existing_objects_matched,
        nothing.assert_nontrivial_match,
    ):
        with pytest.raises(AssertionError, match="no checkpoint to restore"):
            check()
    with pytest.raises(px.errors.NotFoundError, match=r"px\.train\.latest_checkpoint"):
        px.train.Checkpoint(a=a).restore(str(tmp_path))


def test_nothing_changes_unless_all_fits(tmp_path: Path) -> None:
    a, b = px.Variable(1.0), px.Variable([2.0])
    path = px.train.Checkpoint(a=a, b=b).write(str(tmp_path / "x"))
    a.assign(7.0)
    with pytest.raises(ValueError, match=r"'b' is float32\[2\], and float32\[1\]"):
        px.train.Checkpoint(a=a, b=px.Variable([1.0, 2.0])).restore(path)
    data = (tmp_path / "x" / "arrays-00000").read_bytes()
    (tmp_path / "x" / "arrays-00000").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(px.errors.DataLossError, match="checksum"):
        px.train.Checkpoint(b=b, a=a).restore(path)
    (tmp_path / "x" / "arrays-00000").write_bytes(b"")
    with pytest.raises(px.errors.DataLossError, match="too short"):
        px.train.Checkpoint(a=a, b=b).restore(path)
    assert float(a) == 7.0


def test_a_damaged_index_is_noticed(tmp_path: Path) -> None:
    path = Path(px.train.Checkpoint(a=px.Variable(1.0)).write(str(tmp_path / "x")))
    text = (path / "index.json").read_text()
    for broken in (text.replace("float32", "float64"), text[:-5], "[]", '{"body": 1, "checksum": 2}'):
        (path / "index.json").write_text(broken)
        with pytest.raises(px.errors.DataLossError):
            Saved(path)
    with pytest.raises(px.errors.NotFoundError):
        Saved(tmp_path / "nothing")


@settings(max_examples=40)
@given(
    array=hnp.arrays(
        st.sampled_from(["f4", "i4", "u1", "?", "f2", "c8"]), hnp.array_shapes(min_dims=0, min_side=0)
    ),
    cuts=st.lists(st.integers(0, 10), max_size=3),
)
def test_pieces_make_a_whole(array: Any, cuts: list[int], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("pieces") / "x"
    rows = [array] if array.ndim == 0 else np.split(array, sorted(min(c, len(array)) for c in cuts))
    ends = np.cumsum([row.size for row in rows])
    parts = [Part(Flat(int(e) - r.size, int(e)), r) for e, r in zip(ends, rows, strict=True)]
    source = ArraySource(array.shape, array.dtype.name, parts)
    write(path, {"first": source, "second": source}, {"note": 1})
    saved = Saved(path)
    for name in ("first", "second"):
        np.testing.assert_array_equal(saved.read(name), array)
        assert saved.read(name).dtype == array.dtype
    assert saved.values == {"note": {"same": 1}}


def test_types_that_only_jax_has(tmp_path: Path) -> None:
    v = px.Variable(jnp.arange(3, dtype=jnp.bfloat16))
    path = px.train.Checkpoint(v=v).write(str(tmp_path / "x"))
    v.assign(jnp.zeros(3, jnp.bfloat16))
    px.train.Checkpoint(v=v).restore(path)
    assert v.numpy().astype(np.float32).tolist() == [0.0, 1.0, 2.0]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v = px.Variable(1.0)
    checkpoint = px.train.Checkpoint(v=v)
    first = checkpoint.save(str(tmp_path / "ckpt"))

    def fail(*args: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(files, "put_in_place", fail)
        with pytest.raises(OSError, match="full"):
            checkpoint.save(str(tmp_path / "ckpt"))
    assert px.train.latest_checkpoint(str(tmp_path)) == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "ckpt-1"]


def _die_while_writing(folder: str) -> None:
    part = Part(Flat(0, 1), lambda: os._exit(0))
    write(Path(folder) / "ckpt-9", {"v": ArraySource((1,), "float32", [part])}, {})


def test_what_a_dead_process_left_is_no_checkpoint(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_die_while_writing, args=(str(tmp_path),)
    )
    process.start()
    process.join(60)
    (left,) = tmp_path.iterdir()
    assert px.train.latest_checkpoint(str(tmp_path)) is None
    px.train.CheckpointManager(px.train.Checkpoint(v=px.Variable(1.0)), str(tmp_path), 3)
    assert not left.exists()


def test_the_same_path_twice(tmp_path: Path) -> None:
    v = px.Variable(1.0)
    checkpoint = px.train.Checkpoint(v=v)
    checkpoint.write(str(tmp_path / "x"))
    v.assign(2.0)
    checkpoint.write(str(tmp_path / "x"))
    v.assign(3.0)
    checkpoint.read(str(tmp_path / "x"))
    assert float(v) == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_values_of_one_save_belong_together(tmp_path: Path) -> None:
    a, b = px.Variable(jnp.zeros(1000)), px.Variable(jnp.zeros(1000))
    stop = threading.Event()

    @px.function
    def step() -> None:
        a.assign_add(jnp.ones(1000))
        b.assign_add(jnp.ones(1000))

    def train() -> None:
        while not stop.is_set():
            step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        checkpoint = px.train.Checkpoint(a=a, b=b)
        paths = [checkpoint.save(str(tmp_path / "ckpt")) for _ in range(20)]
    finally:
        stop.set()
        thread.join(60)
    for path in paths:
        saved = Saved(Path(path))
        np.testing.assert_array_equal(saved.read("a"), saved.read("b"))


def test_what_cannot_be_saved() -> None:
    with pytest.raises(TypeError, match=r"lr=0\.1"):
        px.train.Checkpoint(lr=0.1)
    with pytest.raises(TypeError, match=r"optimizer=GradientTransformation"):  # it has no state itself
        px.train.Checkpoint(optimizer=optax.adam(0.1))
    with pytest.raises(ValueError, match="'save'"):
        px.train.Checkpoint(save=px.Variable(1.0))
    for params in ({"a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}, {1: jnp.ones(1), "1": jnp.zeros(1)}):
        with pytest.raises(ValueError, match="twice"):  # one of them would be lost
            px.train.Checkpoint(params=params)


@pytest.mark.parametrize("what", ["save", "write", "restore", "manager", "export", "load"])
def test_steps_neither_save_nor_restore(what: str, tmp_path: Path) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = px.Variable(1.0)
    checkpoint = px.train.Checkpoint(v=v)
    manager = px.train.CheckpointManager(checkpoint, str(tmp_path), 1, step_counter=v)
    path = str(tmp_path / "x")
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: checkpoint.save(path),
        "write": lambda: checkpoint.write(path),
        "restore": lambda: checkpoint.restore(path),
        "manager": manager.save,
        "export": lambda: px.train.export_weights(path, {"v": v}),
        "load": lambda: px.train.load_weights(path, {"v": v}),
    }

    def step() -> None:
        calls[what]()

    with pytest.raises(px.errors.ContextError, match="between steps"):
        px.function(step)()
    with pytest.raises(px.errors.ContextError, match="once for all replicas"):
        strategy.run(step)
    assert int(checkpoint.save_counter) == 0
    assert not list(tmp_path.iterdir())
    if what in ("save", "write", "manager", "export"):
        with strategy.scope():
            step()


def test_an_optimizer_without_state_has_nothing_to_save(tmp_path: Path) -> None:
    v = px.Variable(1.0)
    optimizer = px.train.Optimizer(optax.sgd(0.1))
    path = px.train.Checkpoint(v=v, optimizer=optimizer).write(str(tmp_path / "x"))
    assert [name for name, _ in px.train.list_variables(path)] == ["save_counter", "v"]


def test_a_root_has_no_name(tmp_path: Path) -> None:
    path = px.train.Checkpoint(Model()).write(str(tmp_path / "x"))
    assert "w" in dict(px.train.list_variables(path))


# -- the manager ----------------------------------------------------------------------------------


def names(paths: list[str]) -> list[str]:
    return [Path(path).name for path in paths]


def test_old_checkpoints_go_also_after_a_restart(tmp_path: Path) -> None:
    v = px.Variable(0)
    manager = px.train.CheckpointManager(px.train.Checkpoint(v=v), str(tmp_path), max_to_keep=2)
    assert manager.latest_checkpoint is None
    assert manager.restore_or_initialize() is None
    for i in range(3):
        v.assign(i)
        manager.save()
    assert names(manager.checkpoints) == ["ckpt-2", "ckpt-3"]
    again = px.train.CheckpointManager(px.train.Checkpoint(v=v), str(tmp_path), max_to_keep=2)
    v.assign(100)
    assert again.restore_or_initialize() == str(tmp_path / "ckpt-3")
    assert int(v) == 2
    again.save()
    assert names(again.checkpoints) == ["ckpt-3", "ckpt-4"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "ckpt-3", "ckpt-4"]
    assert px.train.latest_checkpoint(str(tmp_path)) == again.latest_checkpoint
    comment, first, *_ = (tmp_path / "checkpoint").read_text().splitlines()
    assert (comment[:9], first) == ("# crc32: ", 'model_checkpoint_path: "ckpt-4"')


def test_numbers_and_intervals(tmp_path: Path) -> None:
    step = px.Variable(0)
    manager = px.train.CheckpointManager(
        px.train.Checkpoint(step=step),
        str(tmp_path),
        max_to_keep=None,
        step_counter=step,
        checkpoint_interval=10,
        checkpoint_name="model",
    )
    assert manager.save(checkpoint_number=0) == str(tmp_path / "model-0")
    step.assign(9)
    assert manager.save(checkpoint_number=9) is None
    assert manager.save(checkpoint_number=9, check_interval=False) is not None
    step.assign(19)
    assert manager.save(checkpoint_number=19) is not None
    assert names(manager.checkpoints) == ["model-0", "model-9", "model-19"]
    assert manager.checkpoint_interval == 10


def test_one_of_every_hour_stays_also_after_a_restart(tmp_path: Path) -> None:
    now = [0.0]

    def manager() -> px.train.CheckpointManager:
        checkpoint = px.train.Checkpoint(v=px.Variable(0))
        made = px.train.CheckpointManager(
            checkpoint, str(tmp_path), 1, keep_checkpoint_every_n_hours=1, clock=lambda: now[0]
        )
        made.restore_or_initialize()
        return made

    first = manager()
    for hours in (0.5, 1.5, 2.0):
        now[0] = hours * 3600
        first.save()
    second = manager()
    for hours in (2.6, 2.7):
        now[0] = hours * 3600
        second.save()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["ckpt-2", "ckpt-4", "ckpt-5"]
    with pytest.raises(ValueError, match="every_n_hours"):
        px.train.CheckpointManager(first.checkpoint, str(tmp_path), 1, keep_checkpoint_every_n_hours=0)


def test_what_a_manager_needs(tmp_path: Path) -> None:
    checkpoint = px.train.Checkpoint(v=px.Variable(0))
    with pytest.raises(TypeError, match="Checkpoint"):
        px.train.CheckpointManager("x", str(tmp_path), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_to_keep"):
        px.train.CheckpointManager(checkpoint, str(tmp_path), 0)
    with pytest.raises(TypeError, match="max_to_keep"):
        px.train.CheckpointManager(checkpoint, str(tmp_path), "3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"checkpoint_name.*Received: 'a/b'"):
        px.train.CheckpointManager(checkpoint, str(tmp_path), 1, checkpoint_name="a/b")
    with pytest.raises(ValueError, match="step_counter"):
        px.train.CheckpointManager(checkpoint, str(tmp_path), 1, checkpoint_interval=5)
    called: list[int] = []
    manager = px.train.CheckpointManager(checkpoint, str(tmp_path), 1, init_fn=lambda: called.append(1))
    manager.restore_or_initialize()
    assert called == [1]


def test_the_iterator_gives_the_newest(tmp_path: Path) -> None:
    checkpoint = px.train.Checkpoint(v=px.Variable(0))
    prefix = str(tmp_path / "ckpt")
    checkpoint.save(prefix)
    iterator = px.train.checkpoints_iterator(str(tmp_path), timeout=30)
    assert Path(next(iterator)).name == "ckpt-1"
    checkpoint.save(prefix)
    checkpoint.save(prefix)
    assert Path(next(iterator)).name == "ckpt-3"
    answers = iter([False, True])
    waiting = px.train.checkpoints_iterator(
        str(tmp_path / "none"), timeout=0, timeout_fn=lambda: next(answers)
    )
    assert list(waiting) == []
    assert list(answers) == []


def test_the_index_is_json(tmp_path: Path) -> None:
    path = px.train.Checkpoint(v=px.Variable([1.0])).write(str(tmp_path / "x"))
    body = json.loads(json.loads((Path(path) / "index.json").read_text())["body"])
    assert body["arrays"]["v"]["shape"] == [1]


# -- parameter servers ----------------------------------------------------------------------------


def test_a_table_is_saved_by_shards_and_restored_in_others(tmp_path: Path) -> None:
    from tests.parameter_server.jobs import Job

    rows = np.arange(30, dtype=np.float32).reshape(10, 3)
    before = Job(3, px.partitioners.FixedShardsPartitioner(3))
    table = before.variable(rows)
    assert table.num_shards == 3
    before.servers.pulls.clear()
    path = px.train.Checkpoint(table=table).write(str(tmp_path / "x"))
    assert len(before.servers.pulls) >= 3  # one shard at a time
    assert dict(px.train.list_variables(path))["table"] == [10, 3]

    after = Job(2, px.partitioners.FixedShardsPartitioner(2))
    other = after.variable(np.zeros((10, 3), np.float32))
    px.train.Checkpoint(table=other).restore(path).assert_consumed()
    np.testing.assert_array_equal(other.numpy(), rows)

    plain = px.Variable(np.zeros((10, 3), np.float32))
    px.train.Checkpoint(table=plain).restore(path)
    np.testing.assert_array_equal(plain.numpy(), rows)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int8])
def test_no_count_is_lost_over_replicas(dtype: Any, tmp_path: Path) -> None:
    """`assign` divides by the number of replicas and cuts, as in TensorFlow; a checkpoint must not."""
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    with strategy.scope():
        zeros = jnp.zeros(4, dtype)
        v = px.Variable(zeros, trainable=False, synchronization=ON_READ, aggregation=SUM)
    wanted = np.array([10, 3, 0, 0], dtype)
    wanted[3] -= np.array(7, dtype)  # a number below 0, or the largest ones
    path = px.train.Checkpoint(v=px.Variable(wanted)).write(str(tmp_path / "x"))
    px.train.Checkpoint(v=v).restore(path).assert_consumed()
    np.testing.assert_array_equal(v.numpy(), wanted)
    assert [int(copy[0]) for copy in v.values] == [3, 3, 2, 2]
    v.assign(jnp.zeros(4, dtype))
    strategy.run(lambda: v.assign_add(jnp.ones(4, dtype)))
    path = px.train.Checkpoint(v=v).write(str(tmp_path / "y"))
    px.train.Checkpoint(v=v).restore(path)
    assert v.numpy().tolist() == [4, 4, 4, 4]
    with pytest.raises(ValueError, match="shape"):
        v.load_state(np.zeros(3, dtype))


def test_a_table_is_saved_in_the_background_with_the_values_of_its_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.parameter_server.jobs import Job

    job = Job(3, px.partitioners.FixedShardsPartitioner(3))
    table = job.variable(np.zeros((10, 3), np.float32))
    is_changed = threading.Event()

    def begin_late(path: Path) -> Path:
        assert is_changed.wait(60)
        return begin(path)

    monkeypatch.setattr(directories, "begin", begin_late)
    checkpoint = px.train.Checkpoint(table=table)
    path = checkpoint.write(str(tmp_path / "x"), px.train.CheckpointOptions(enable_async=True))
    table.assign(np.ones((10, 3), np.float32))
    is_changed.set()
    checkpoint.sync()
    assert not px.train.load_variable(path, "table").any()


def test_an_array_of_which_a_part_is_missing_is_not_saved(tmp_path: Path) -> None:
    partial = begin(tmp_path / "x")
    part = write_part(partial, 0, {"a": ArraySource((3,), "int32", [])}, {})
    with pytest.raises(ValueError, match=r"0 of the 3 elements.*Received: 'a'"):
        commit(partial, tmp_path / "x", [part])
    assert not (tmp_path / "x").exists()
