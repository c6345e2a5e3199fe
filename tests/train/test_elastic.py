"""Elastic training: workers come and go, every example counts once, and the weights are the same."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.train import elastic_program

import phalanx as px
from phalanx.core.regions import Flat
from phalanx.job.elastic import visitor
from phalanx.job.elastic.door import Door
from phalanx.job.elastic.membership import ElasticMembership
from phalanx.job.elastic.orders import WorkerLimits
from phalanx.job.launch.exit_policy import is_lost
from phalanx.train.checkpoints.restoring import Restoring
from phalanx.train.elastic_training import reforming
from phalanx.train.elastic_training.batch_policy import batch_size_for
from phalanx.train.elastic_training.carried_state import CarriedState, StateReferences

PROGRAM = str(Path(elastic_program.__file__))


@dataclass
class History:
    """What the workers of a job wrote down, and what the launcher said."""

    rows: list[list[Any]]
    ends: list[list[Any]]
    said: str
    code: int

    def applied(self) -> dict[int, tuple[int, list[int]]]:
        """The epoch and the examples of each step, as it was made last.

        A step that was begun when a worker died has either happened on a survivor, and is not made
        again, or is made again by the next generation.
        """
        last: dict[int, int] = {}
        for generation, _, step, *_ in self.rows:
            last[step] = max(generation, last.get(step, 0))
        steps: dict[int, tuple[int, list[int]]] = {}
        for generation, _, step, epoch, mine, _ in self.rows:
            if generation == last[step]:
                steps.setdefault(step, (epoch, []))[1].extend(mine)
        return steps

    def sizes(self) -> dict[int, int]:
        """How many workers each generation had."""
        return {row[0]: row[1] for row in self.rows}


def play(tmp_path: Path, plan: dict[str, str], *options: str, epochs: int = 2, **how: Any) -> History:
    order = {"folder": str(tmp_path), "plan": plan, "epochs": epochs, "options": how}
    command = [sys.executable, "-m", "phalanx", "run", *options, "--", PROGRAM, json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    rows, ends = [], []
    for path in tmp_path.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            (ends if row[0] == "end" else rows).append(row)
    return History(rows, ends, done.stdout + done.stderr, done.returncode)


def undisturbed(epochs: int, tmp_path: Path) -> list[float]:
    """The weights of a training in this process, which no other disturbs."""
    elastic_program.main(tmp_path, {}, epochs, {})
    (path,) = tmp_path.glob("*.jsonl")
    *_, end = path.read_text().splitlines()
    path.unlink()
    weights: list[float] = json.loads(end)[1]
    return weights


def check_every_example_counts_once(history: History, epochs: int) -> None:
    steps = history.applied()
    assert sorted(steps) == list(range(len(steps)))
    for epoch in range(epochs):
        seen = Counter(i for of, mine in steps.values() if of == epoch for i in mine)
        assert seen == Counter(range(elastic_program.EXAMPLES)), f"epoch {epoch}"


def test_a_killed_worker_and_one_that_joins(tmp_path: Path) -> None:
    """Three workers; one is killed in mid-epoch, and a new one joins in the next.

    One survivor keeps an array of the old devices, so Python starts anew there; the other goes on in
    the same process, as soon as the thread that reads its input has let go of another, and although its
    loop ignores exceptions. The program has an array at its top, which all use. All examples count
    once, and the weights are those of an undisturbed training.
    """
    expected = undisturbed(2, tmp_path)
    plan = {"1@3": "kill", "2@1": "keep", "0@9": "until stop", "2@9": "until stop"}
    plan |= {"0@input": "linger", "0@errors": "ignore"}
    history = play(tmp_path, plan, "--workers", "2:3", "--restarts", "1")
    assert history.code == 0, history.said
    assert history.sizes() == {1: 3, 2: 2, 3: 3}, history.said
    assert "worker 1 was killed by signal 9 (SIGKILL)" in history.said
    assert "keeps 1 arrays of the old devices (float32[3])" in history.said
    assert history.said.count("Python starts anew") == 1
    check_every_example_counts_once(history, 2)
    assert len(history.applied()) == 14  # the global batch has stayed
    assert len(history.ends) == 3
    for _, weights, _, seen in history.ends:
        assert seen == 2 * sum(range(elastic_program.EXAMPLES))
        assert weights == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_worker_with_a_notice_takes_nothing_with_it(tmp_path: Path) -> None:
    """A metric is spread over the workers, so a checkpoint carries it; the global batch scales."""
    folder = str(tmp_path / "checkpoints")
    how = {"metric": True, "checkpoint_dir": folder, "policy": "scale"}
    plan = {"1@2": "notice", "0@3": "until stop", "1@3": "until stop"}
    history = play(tmp_path, plan, "--workers", "1:2", epochs=1, **how)
    assert history.code == 0, history.said
    assert history.sizes() == {1: 2, 2: 1}, history.said
    check_every_example_counts_once(history, 1)
    batches = [len(mine) for _, (_, mine) in sorted(history.applied().items())]
    changed = batches.index(3)
    assert batches[:changed] == [6] * changed
    assert set(batches[changed:-1]) == {3}
    ((_, _, total, _),) = history.ends
    assert total == elastic_program.EXAMPLES
    assert px.train.latest_checkpoint(folder) == f"{folder}/ckpt-{changed}"


# -- one process ---------------------------------------------------------------------------------


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Without a launcher, `elastic` trains once, and restores what an earlier run has saved."""
    seen: list[int] = []
    interrupted: list[bool] = []

    def train(job: px.train.ElasticContext) -> int:
        with job.strategy.scope():
            count = px.Variable(0)
        job.track(count=count)
        for batch in job.steps(px.data.Dataset.range(12).shuffle(12, seed=2), epochs=2):
            if job.step == 4 and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            parts = job.strategy.experimental_local_results(batch)
            seen.extend(int(i) for part in parts for i in part)
            count.assign_add(1)
        return int(count)

    how: dict[str, Any] = {"batch_size": 4, "checkpoint_dir": str(tmp_path), "save_every": 1}
    with pytest.raises(KeyboardInterrupt):
        px.train.elastic(train, **how)
    assert len(seen) == 16
    assert px.train.elastic(train, **how) == 6
    assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12))


def test_a_worker_that_does_not_find_its_launcher_again_ends_as_a_lost_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be cut off, and the others go on: another code than that of a program that fails."""
    monkeypatch.setattr(visitor, "_REFUSALS", 0.2)
    door = Door(ElasticMembership(WorkerLimits(2, 2)), "secret", None)  # type: ignore[arg-type]
    with door:
        door.started(0, "worker 0")
        for name, value in (("", door.address), ("_NUMBER", "0")):
            monkeypatch.setenv(f"PHALANX_DOOR{name}", value)
        monkeypatch.setenv("PHALANX_TOKEN", "secret")
        closing = threading.Thread(target=_close_when_one_waits, args=(door,))
        closing.start()
        with pytest.raises(SystemExit) as ended:
            px.train.elastic(lambda job: None, batch_size=1)
        closing.join()
    assert is_lost(ended.value.code)  # type: ignore[arg-type]
    assert f"Received: {door.address}, which could not be reached again" in caplog.text


def _close_when_one_waits(door: Door) -> None:
    elastic_program.wait_for(lambda: ("worker 0", "waits at the door") in door.membership.describe())
    door.__exit__()


def test_other_devices_than_cpus_must_not_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the worker arrives, so it takes no others along."""
    kept = jnp.ones(3)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(px.errors.FailedPreconditionError, match=r"gpu.*px.train.elastic.*arrays"):
        reforming.begin_before_joining()
    assert kept.tolist() == [1.0, 1.0, 1.0]


def test_the_loop_and_the_state_are_given_once() -> None:
    numbers = px.data.Dataset.range(4)

    def no_state(job: px.train.ElasticContext) -> None:
        job.steps(numbers)

    def two_states(job: px.train.ElasticContext) -> None:
        job.track(v=px.Variable(0.0))
        job.track(w=px.Variable(0.0))

    def two_loops(job: px.train.ElasticContext) -> None:
        job.track(v=px.Variable(0.0))
        job.steps(numbers)
        job.steps(numbers)

    def no_dataset(job: px.train.ElasticContext) -> None:
        job.track(v=px.Variable(0.0))
        job.steps([1, 2])  # type: ignore[arg-type]

    def nothing(job: px.train.ElasticContext) -> None:
        job.track()

    def not_built(job: px.train.ElasticContext) -> None:
        job.track(v=px.Variable(0.0), parts=[px.train.Optimizer(optax.adam(0.1))])

    for train, error, said in (
        (no_state, px.errors.ContextError, "`track` before `steps`"),
        (two_states, px.errors.ContextError, "given once"),
        (two_loops, px.errors.ContextError, "one loop"),
        (no_dataset, px.errors.InvalidTypeError, "single examples"),
        (nothing, px.errors.InvalidValueError, "`track` needs"),
        (not_built, px.errors.InvalidValueError, r"optimizer.build.*Received: parts/0 without"),
    ):
        with pytest.raises(error, match=said):
            px.train.elastic(train, batch_size=2)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2, "policy": "twice"}, "keep_global_batch"),
        ({"batch_size": 2, "save_every": 3}, "checkpoint_dir"),
        ({"batch_size": 2, "policy": lambda workers: 0}, "at least 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises((px.errors.InvalidValueError, px.errors.InvalidTypeError), match=said):
        px.train.elastic(lambda job: None, **how)


def test_the_batch_is_never_empty() -> None:
    assert batch_size_for("scale", 4, 1, 8) == 1


def test_a_step_after_which_the_loop_is_left_is_made_again_from_the_state_before() -> None:
    """If the end of the training has to be done again, for the sake of a worker that was lost in it."""

    def train(job: px.train.ElasticContext) -> tuple[px.train.ElasticContext, px.Variable]:
        job.workers = 2  # which hold the state before each step
        w = px.Variable(0)
        job.track(w=w)
        for i, _ in enumerate(job.steps(px.data.Dataset.range(8), epochs=2)):
            w.assign_add(1)
            if i == 2:
                break
        return job, w

    job, w = px.train.elastic(train, batch_size=2)
    step, carried = job.end(failed=False)
    assert (int(w), step) == (3, 2)
    assert carried is not None
    assert int(carried.read("w")) == 2


def test_state_in_memory_goes_through_bytes() -> None:
    """Variables, keys and numbers come back as they were when the step had ended."""
    variable = px.Variable(jnp.arange(6.0).reshape(2, 3))
    things = {
        "v": variable,
        "x": np.arange(3, dtype=np.int8),
        "n": 7,
        "half": jnp.ones(2, jnp.bfloat16),
    }
    references = StateReferences(things)
    assert references.is_whole()
    variable.assign(jnp.zeros((2, 3)))
    state = CarriedState.unpack(references.carried().pack())
    assert state.read("v", Flat(1, 3)).tolist() == [1.0, 2.0]
    restoring = Restoring(state, things)  # type: ignore[arg-type]
    restoring.read()
    others = restoring.give()
    assert np.asarray(variable.value()).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert (others["n"], others["x"].tolist()) == (7, [0, 1, 2])
    assert others["half"].dtype == jnp.bfloat16


def test_bytes_that_are_no_state_are_an_error() -> None:
    with pytest.raises(px.errors.DataLossError):
        CarriedState.unpack(np.arange(40, dtype=np.uint8))
