"""Checkpoints go from any number of replicas, workers and slices to any other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.train.checkpoints import files
from tests.multi_worker.checkpoint_sessions import Session, restore, save
from tests.multi_worker.rules import strategy
from tests.processes import wait_until

LEVELS = ("states", "gradients", "parameters")


def mirrored(replicas: int) -> px.Strategy:
    return px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def laid_out(plan: dict[str, Any]) -> px.Strategy:
    return px.AutoParallelStrategy(devices=["CPU:0", "CPU:1"], parameter_plan=plan)


HERE: dict[str, Callable[[], Session]] = {
    "one": lambda: Session(px.OneDeviceStrategy("CPU:0")),
    "none": lambda: Session(px.get_strategy()),
    "mirrored": lambda: Session(mirrored(2)),
    "four": lambda: Session(mirrored(4)),
    **{level: functools.partial(lambda x: Session(mirrored(2), x), level) for level in LEVELS},
    "four slices": lambda: Session(mirrored(4), "parameters"),
    "by rows": lambda: Session(laid_out({"w": (2, 1), "b": (2,)})),
    "by columns": lambda: Session(laid_out({"w": (1, 2)})),
}
MORE = {
    f"four, {level}": functools.partial(lambda x: Session(mirrored(4), x), level)
    for level in LEVELS[:2]
}
QUICK = ("one", "mirrored", "four", *LEVELS, "by rows")
OVER_WORKERS = (None, *LEVELS)


def in_worker(level: str | None) -> Session:
    return Session(strategy(), level)


@pytest.mark.parametrize(
    ("cluster", "names", "levels"),
    [
        pytest.param("2x1", QUICK, (None, "parameters"), id="some on two workers"),
        pytest.param("2x2", HERE, OVER_WORKERS, id="all on two", marks=pytest.mark.soak),
        pytest.param("3x1", HERE, OVER_WORKERS, id="all on three", marks=pytest.mark.soak),
    ],
    indirect=["cluster"],
)
def test_any_strategy_takes_the_checkpoints_of_any_other(
    cluster: px.testing.MultiProcess, names: Any, levels: Any, tmp_path: Path
) -> None:
    expected, paths = [], []
    sessions = {name: HERE[name]() for name in names}
    for name, session in sessions.items():
        paths.append(str(tmp_path / name.replace(" ", "_")))
        expected.append(save(session, paths[-1]))
    for level in levels:
        path = str(tmp_path / f"workers_{level}")
        answers = cluster.run(lambda: save(in_worker(level), path, is_async=level == "states"))
        np.testing.assert_allclose(answers, [answers[0]] * len(answers), rtol=1e-5)
        expected.append(answers[0])
        paths.append(path)
    assert len(list((tmp_path / "workers_parameters").glob("arrays-*"))) > 1  # each wrote its slices
    np.testing.assert_allclose(expected, [expected[0]] * len(expected), rtol=1e-4)

    for name, session in sessions.items():
        losses = restore(session, paths)
        np.testing.assert_allclose(losses, expected, rtol=1e-4, err_msg=name)
    for level in levels:
        for losses in cluster.run(lambda: restore(in_worker(level), paths)):
            np.testing.assert_allclose(losses, expected, rtol=1e-4, err_msg=str(level))


@pytest.mark.parametrize("cluster", ["2x1"], indirect=True)
@pytest.mark.parametrize("level", [None, "parameters"])
def test_values_wait_for_the_optimizers_of_workers(
    level: str | None, cluster: px.testing.MultiProcess, tmp_path: Path
) -> None:
    """Also those of another strategy, and those that are saved again before the first step."""
    saved, there, again = (str(tmp_path / name) for name in ("saved", "there", "again"))
    expected = save(HERE["mirrored"](), saved)

    def go_on() -> list[list[float]]:
        save(in_worker(level), there)
        found = []
        for path, kept in ((saved, again), (there, None), (again, None)):
            session = Session(strategy(), level, is_built=False)
            status = session.checkpoint.restore(path)
            assert {name.partition("/")[0] for name in status.unused} == {"optimizer"}
            if kept is not None:
                session.checkpoint.write(kept)
            found.append(session.steps(10))
            status.assert_consumed()
        return found

    for found in cluster.run(go_on):
        np.testing.assert_allclose(found, [expected] * 3, rtol=1e-4)
    session = Session(mirrored(2), level, is_built=False)
    session.checkpoint.restore(there)
    np.testing.assert_allclose(session.steps(10), expected, rtol=1e-4)


@pytest.mark.soak
def test_two_and_three_workers_take_the_checkpoints_of_each_other_and_of_all(tmp_path: Path) -> None:
    """Each of 1, 2 and 4 replicas, 2 and 3 workers, and levels of sharding, to each other."""
    env, preload = {"PHALANX_DEADLINE": "60"}, ("phalanx", "tests.multi_worker.rules")
    here = {name: make() for name, make in {**HERE, **MORE}.items()}
    saved: dict[str, list[float]] = {}
    for name, session in here.items():
        path = str(tmp_path / name.replace(" ", "_"))
        saved[path] = save(session, path)
    with (
        px.testing.MultiProcess(2, 1, env=env, preload=preload) as two,
        px.testing.MultiProcess(3, 1, env=env, preload=preload) as three,
    ):
        over = [(count, level) for count in (2, 3) for level in OVER_WORKERS]
        for count, level in over:
            path = str(tmp_path / f"{count}_workers_{level}")
            saved[path] = (two if count == 2 else three).run(
                lambda: save(in_worker(level), path), timeout=120.0
            )[0]
        assert len(saved) == len(here) + 8
        expected, paths = list(saved.values()), list(saved)
        np.testing.assert_allclose(expected, [expected[0]] * len(expected), rtol=1e-4)
        for name, session in here.items():
            np.testing.assert_allclose(restore(session, paths), expected, rtol=1e-4, err_msg=name)
        for count, level in over:
            answers = (two if count == 2 else three).run(
                lambda: restore(in_worker(level), paths), timeout=300.0
            )
            for losses in answers:
                np.testing.assert_allclose(losses, expected, rtol=1e-4, err_msg=f"{count} {level}")


@pytest.mark.soak
def test_slices_of_workers_become_one_checkpoint_of_orbax(tmp_path: Path) -> None:
    path, env = str(tmp_path / "orbax"), {"PHALANX_DEADLINE": "150"}  # a new process imports Orbax
    with px.testing.MultiProcess(2, 1, env=env, preload=["phalanx"]) as cluster:
        answers = cluster.run(
            lambda: save(in_worker("parameters"), path, format="orbax"), timeout=200.0
        )
    assert (tmp_path / "orbax" / "_CHECKPOINT_METADATA").exists()
    assert not list(tmp_path.glob(".*")), "no part is left"
    (losses,) = restore(Session(mirrored(2)), [path])
    np.testing.assert_allclose(losses, answers[0], rtol=1e-4)


@pytest.mark.parametrize("cluster", ["2x1"], indirect=True)
def test_who_writes_what(cluster: px.testing.MultiProcess, tmp_path: Path) -> None:
    """The first worker waits for none if it has everything; else all must write to one place."""

    def together() -> tuple[Any, ...]:
        s = strategy()
        rank = s.cluster_resolver.task_id
        with s.scope():
            w = px.Variable([1.0, 2.0])
            seen = px.train.Sum()
        s.run(lambda: seen.update_state(px.get_replica_context().replica_id_in_sync_group + 1.0))
        checkpoint = px.train.Checkpoint(w=w)
        if rank == 0:  # as programs do that save in the chief only
            checkpoint.write(str(tmp_path / "chief"))
        other = px.train.Checkpoint(w=w)
        other.write(str(tmp_path / f"own-{rank}"))  # as TensorFlow's tutorials do
        whole = px.train.Checkpoint(w=w, seen=seen, state=_PerWorker(rank))
        whole.write(str(tmp_path / "all"))
        reader = px.train.load_checkpoint(str(tmp_path / "all"))
        whole.restore(str(tmp_path / "all")).assert_consumed()
        try:
            whole.write(str(tmp_path / f"apart-{rank}"))
        except px.PhalanxError as error:
            problem = f"{type(error).__name__}: {error}"
        return float(reader.get_tensor("seen/0")), float(seen.result()), problem, whole.state.seen

    answers = cluster.run(together)
    for rank, (saved, restored, problem, state) in enumerate(answers):
        assert (saved, restored, state) == (3.0, 3.0, rank)
        assert "the same directory" in problem
    assert px.train.load_variable(str(tmp_path / "chief"), "w").tolist() == [1.0, 2.0]
    assert px.train.load_variable(str(tmp_path / "own-1"), "w").tolist() == [1.0, 2.0]
    assert not list(tmp_path.glob(".*")), "no half written checkpoint is left"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("cluster", ["2x1"], indirect=True)
def test_the_first_worker_may_save_more_than_the_others(
    is_async: bool, cluster: px.testing.MultiProcess, tmp_path: Path
) -> None:
    """With parts on all workers, and without; before, between and after what all save."""

    def unequal() -> tuple[list[str], list[str]]:
        s = strategy()
        is_first = s.cluster_resolver.task_id == 0
        with s.scope():
            w = px.Variable([1.0, 2.0])
            seen = px.train.Sum()
        options = px.train.CheckpointOptions(enable_async=is_async)
        if is_first:
            best = px.train.Checkpoint(w=w)
            best.save(str(tmp_path / "best" / "ckpt"))
        small = px.train.CheckpointManager(px.train.Checkpoint(w=w), tmp_path / "small", 2)
        large = px.train.CheckpointManager(px.train.Checkpoint(w=w, seen=seen), tmp_path / "large", 2)
        for i in range(3):
            s.run(lambda: seen.update_state(jnp.ones(1)))
            small.save(options=options)
            if is_first and i == 1:
                best.save(str(tmp_path / "best" / "ckpt"))
                best.write(str(tmp_path / "again"))
            large.save(options=options)
            small.checkpoint.write(str(tmp_path / "again"))
        small.sync()
        large.sync()
        for manager in (small, large):
            manager.restore_or_initialize()
        assert float(seen.result()) == 6.0
        return small.checkpoints, large.checkpoints

    first, second = cluster.run(unequal)
    assert first == second
    for folder in ("small", "large"):
        assert {p.name for p in (tmp_path / folder).iterdir()} == {"checkpoint", "ckpt-2", "ckpt-3"}
    assert len(list((tmp_path / "best").glob("ckpt-*"))) == 2
    assert not list((tmp_path / "small").glob("*/arrays-00001"))


@pytest.mark.parametrize("cluster", ["2x1"], indirect=True)
@pytest.mark.parametrize("is_spread", [False, True])
def test_workers_that_count_differently_are_told_both_paths(
    is_spread: bool, cluster: px.testing.MultiProcess, tmp_path: Path
) -> None:
    def unequal() -> list[str]:
        s = strategy()
        is_first = s.cluster_resolver.task_id == 0
        with s.scope():
            w = px.Variable([1.0, 2.0])
        parts = {"state": _PerWorker(s.cluster_resolver.task_id)} if is_spread else {}
        checkpoint = px.train.Checkpoint(w=w, **parts)
        manager = px.train.CheckpointManager(checkpoint, tmp_path / "all", 5)
        manager.save()
        if is_first:
            checkpoint.save_counter.assign_add(1)
        found = []
        for _ in range(2):
            try:
                found.append(str(manager.save()).rpartition("/")[2])
            except px.PhalanxError as error:
                found.append(str(error))
        return found

    first, second = cluster.run(unequal)
    for i, problem in enumerate(second, 2):
        assert f"{tmp_path}/all/ckpt-{i}'" in problem
        assert f"{tmp_path}/all/ckpt-{i + 1}'" in problem
        assert "The numbers differ" in problem
    if is_spread:
        for problem, other in zip(first, second, strict=True):
            assert "because worker 1 saves to" in problem
            assert "The numbers differ" in other
    else:
        assert first == ["ckpt-3", "ckpt-4"]
    there = {"ckpt-1"} if is_spread else {"ckpt-1", "ckpt-3", "ckpt-4"}
    assert {p.name for p in (tmp_path / "all").iterdir()} == {"checkpoint", *there}


@pytest.mark.parametrize("cluster", ["2x1"], indirect=True)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_that_fails_on_one_worker_is_told_to_all(
    failing: int, cluster: px.testing.MultiProcess, tmp_path: Path
) -> None:
    def go_on() -> tuple[list[str], int]:
        rank = strategy().cluster_resolver.task_id
        with strategy().scope():
            w = px.Variable([1.0, 2.0])
        state = _PerWorker(rank)
        checkpoint = px.train.Checkpoint(w=w, state=state)
        state.fails = rank == failing
        found = []
        for _ in range(2):  # the same path again, and others
            for saving in (checkpoint.write, checkpoint.save):
                try:
                    saving(str(tmp_path / "all"))
                except (RuntimeError, px.errors.AbortedError) as error:
                    found.append(f"{type(error).__name__}: {error}")
            state.fails = False
        checkpoint.restore(str(tmp_path / "all-2")).assert_consumed()
        return found, state.seen

    for rank, (found, seen) in enumerate(cluster.run(go_on)):
        assert seen == rank
        assert len(found) == 2
        for problem in found:
            assert "has no state" in problem
            assert problem.startswith("RuntimeError" if rank == failing else "AbortedError")
    assert {p.name for p in tmp_path.iterdir()} == {"all", "all-2", "checkpoint"}


@pytest.mark.parametrize("cluster", ["2x1"], indirect=True)
@pytest.mark.parametrize("having", [0, 1])
def test_workers_that_save_other_objects_are_told(
    having: int, cluster: px.testing.MultiProcess, tmp_path: Path
) -> None:
    def differ() -> str:
        rank = strategy().cluster_resolver.task_id
        with strategy().scope():
            w = px.Variable([1.0, 2.0])
        more = {"state": _PerWorker(rank)} if rank == having else {}
        try:
            px.train.Checkpoint(w=w, **more).write(str(tmp_path / "all"))
        except px.PhalanxError as error:
            return str(error)
        return ""

    first, second = cluster.run(differ)
    assert "must save the same objects" in second
    assert having == 1 or "must save the same objects" in first


class _PerWorker:
    fails = False

    def __init__(self, rank: int | None) -> None:
        self.rank, self.seen = rank, -1

    def state(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("it has no state")
        return {"rank": self.rank, "array": np.full(2, self.rank)}

    def restore(self, state: dict[str, Any]) -> None:
        assert state["array"].tolist() == [state["rank"]] * 2
        self.seen = state["rank"]


@pytest.mark.parametrize("cluster", ["2x1"], indirect=True)
@pytest.mark.parametrize("is_spread", [False, True])
def test_what_fails_on_one_worker_only_does_not_let_it_count_otherwise(
    is_spread: bool, cluster: px.testing.MultiProcess, tmp_path: Path
) -> None:
    """A callback fails in the background on the second worker, which hears of it in its next save."""

    def go_on() -> list[str]:
        s = strategy()
        rank = s.cluster_resolver.task_id
        with s.scope():
            w = px.Variable([1.0, 2.0])
        parts = {"state": _PerWorker(rank)} if is_spread else {}
        checkpoint = px.train.Checkpoint(w=w, **parts)
        manager = px.train.CheckpointManager(checkpoint, tmp_path / "managed", 5)
        found = []

        def upload() -> None:
            if rank == 1:
                raise RuntimeError("no answer")

        for write in (
            lambda options=None: manager.save(options=options),
            lambda options=None: checkpoint.save(str(tmp_path / "alone" / "ckpt"), options),
        ):
            write(px.train.CheckpointOptions(experimental_write_callbacks=[upload], enable_async=True))
            wait_until(lambda: not checkpoint.is_saving)
            for _ in range(2):
                try:
                    found.append(str(write()).rpartition("/")[2])
                except (RuntimeError, px.errors.AbortedError) as error:
                    found.append(f"{type(error).__name__}: {error}")
        return found

    first, second = cluster.run(go_on)
    assert second == ["RuntimeError: no answer", "ckpt-3", "RuntimeError: no answer", "ckpt-6"]
    assert first[1::2] == ["ckpt-3", "ckpt-6"]
    if is_spread:
        assert all("because worker 1 raised RuntimeError: no answer" in x for x in first[::2])
    else:
        assert first[::2] == ["ckpt-2", "ckpt-5"]


@pytest.mark.parametrize("cluster", ["2x1"], indirect=True)
@pytest.mark.parametrize("damage", ["it is too short", "it is a directory", "another error"])
def test_no_worker_restores_what_one_of_them_cannot_read(
    damage: str, cluster: px.testing.MultiProcess, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("another error")

    def broken() -> tuple[list[str], float]:
        s = strategy()
        rank = s.cluster_resolver.task_id
        with s.scope():
            w = px.Variable(1.0)
        checkpoint = px.train.Checkpoint(w=w)
        path = str(tmp_path / f"own-{rank}")
        checkpoint.write(path)
        w.assign(2.0)
        read, file = files.Saved.read, Path(path, "arrays-00000")
        if rank == 1:
            if damage == "another error":
                files.Saved.read = fail  # type: ignore[method-assign]
            else:
                file.unlink()
                file.mkdir() if damage == "it is a directory" else file.touch()
        problems = []
        try:
            checkpoint.restore(path)
        except (ValueError, px.errors.DataLossError) as error:
            problems.append(str(error))
        finally:
            files.Saved.read = read  # type: ignore[method-assign]
        return problems, float(w)

    said = {"it is too short": "too short", "it is a directory": "Is a directory"}
    for (problem,), value in cluster.run(broken):
        assert value == 2.0
        assert said.get(damage, damage) in problem
