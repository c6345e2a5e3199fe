"""The example scripts run under every strategy and learn the same."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.launching import AS_USERS, new_processes, run_program, run_script

from phalanx.testing import faults

EXAMPLES = Path(__file__).parents[2] / "examples"

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    with new_processes() as cluster:

        def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
            return cluster.run(run_program, str(EXAMPLES / script), *options, timeout=300)[0]

        yield run


def losses(start: Start, script: str, *options: str) -> list[tuple[float, float]]:
    """The loss and the test loss of each epoch, as the script printed them."""
    done = start(script, *options)
    assert done.returncode == 0, done.stderr
    assert "eagerly" not in done.stderr, "the compiled step fell back to the eager executor"
    found = re.findall(r"^epoch \d+: loss ([\d.]+),.* test loss ([\d.]+)", done.stdout, re.MULTILINE)
    return [(float(loss), float(test)) for loss, test in found]


def same(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> bool:
    return len(a) == len(b) and all(x == pytest.approx(y, rel=1e-4) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def of_one_device(start: Start) -> list[tuple[float, float]]:
    return losses(start, "custom_training_loop.py", "--strategy", "one", "--replicas", "1")


def test_it_learns(of_one_device: list[tuple[float, float]]) -> None:
    assert len(of_one_device) >= 3
    assert of_one_device[-1] < of_one_device[0]


# Each script under one strategy; the contract suite has them all.
@pytest.mark.parametrize(
    ("script", "strategy"), [("custom_training_loop.py", "central"), ("pure_jax.py", "mirrored")]
)
def test_four_replicas_learn_what_one_device_learns(
    start: Start, script: str, strategy: str, of_one_device: list[tuple[float, float]]
) -> None:
    assert same(losses(start, script, "--strategy", strategy, "--replicas", "4"), of_one_device)


@pytest.mark.soak  # tests/parallel has such plans
def test_plans_of_a_gpt(start: Start) -> None:
    done = start("gpt_plans.py", "--regime", "weights", "--devices", "2")
    assert done.returncode == 0, done.stderr
    for line in ("blocks/up is cut (None, 'x')", "blocks/down is cut ('x',)"):  # as Megatron has it
        assert line in done.stdout
    first, last = re.findall(r"loss ([\d.]+) to ([\d.]+)", done.stdout)[0]
    assert float(last) < float(first) / 4


@pytest.mark.soak
def test_plans_of_a_model_with_embeddings(start: Start) -> None:
    done = start("embedding_plans.py", "--devices", "2")
    assert done.returncode == 0, done.stderr
    large, small = done.stdout.split("small tables")
    assert "users is cut" in large
    assert "up is whole" in large
    assert "users_1 is cut ('x',)" in small  # the batch
    first, last = re.findall(r"loss ([\d.]+) to ([\d.]+)", done.stdout)[0]
    assert float(last) < float(first) / 4


def test_an_mlp_in_two_modes(start: Start) -> None:
    """All modes are in the tests of `px.parallel`."""
    found = [
        re.findall(r"^epoch .*$", start("auto_parallel.py", "--mode", mode).stdout, re.MULTILINE)
        for mode in ("auto_parallel", "semi_auto_parallel")
    ]
    assert len(found[0]) == 3
    assert found[0] == found[1]


def test_replicas_must_divide_the_batch(start: Start) -> None:
    done = start("custom_training_loop.py", "--replicas", "3")
    assert done.returncode == 2
    assert "--replicas" in done.stderr


def test_workers_learn_what_one_process_learns(start: Start, tmp_path: Path) -> None:
    def epochs(done: subprocess.CompletedProcess[str]) -> list[str]:
        assert done.returncode == 0, done.stderr
        return re.findall(r"epoch \d+: loss [\d.]+", done.stdout)

    alone = epochs(start("multi_worker.py"))
    assert len(alone) == 4
    assert epochs(launch(tmp_path, "multi_worker.py", workers=2)) == alone


def launch(
    tmp_path: Path, script: str, *words: str, **settings: Any
) -> subprocess.CompletedProcess[str]:
    done = run_script(EXAMPLES / script, *words, folder=tmp_path, env=AS_USERS, **settings)
    assert done.returncode == 0, done.stderr
    return done


def test_parameter_servers_count_each_step_once(tmp_path: Path) -> None:
    words = ["--steps", "200", "--kill"]
    done = launch(tmp_path, "parameter_server.py", *words, workers=2, ps=2, restarts=1)
    assert "[chief 0] 200 of 200 steps counted\n" in done.stdout
    (loss,) = re.findall(r"step 200: loss ([\d.]+)", done.stdout)
    assert float(loss) < 0.1


@pytest.mark.soak  # tests/strategies has such jobs
def test_workers_share_variables_without_a_coordinator(tmp_path: Path) -> None:
    done = launch(tmp_path, "parameter_server_workers.py", workers=2, ps=1, chief=False)
    assert "weights [ 1. -2.  3.], bias 4.0" in done.stdout
    assert ", 300 steps of all workers" in done.stdout  # no update of a worker is lost


def test_an_embedding_on_servers_learns_and_is_evaluated(tmp_path: Path) -> None:
    small = ["--rows", "5000", "--width", "16", "--checkpoints", str(tmp_path / "saved")]
    done = launch(tmp_path, "embedding.py", *small, workers=2, ps=2, evaluator=True)
    losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert losses == sorted(losses, reverse=True)
    assert "2 shards" in done.stdout
    (last,) = re.findall(r"ckpt-4: accuracy ([\d.]+)", done.stdout)
    assert float(last) > 0.8


@pytest.mark.soak  # tests/testing/test_laboratory.py plays such faults
def test_a_training_survives_its_own_sabotage() -> None:
    """A kill, a preemption, a bug and a damaged checkpoint; the model is that of a run without."""
    script = [str(EXAMPLES / "sabotage.py"), "--checkpoints", "{folder}"]
    alone, two = faults.JobSchedule(0, 1), faults.JobSchedule(0, 2)
    undisturbed = faults.run(script, alone, preload=["phalanx"], deadline=20.0)
    sabotaged = faults.run([*script, "--sabotage"], two, restarts=3, preload=["phalanx"], deadline=20.0)
    (wanted,) = re.findall(r"24 steps, loss .*", undisturbed.output)
    assert re.findall(r"24 steps, loss .*", sabotaged.output) == [wanted], sabotaged.output
    assert sabotaged.history.attempts == 4
    codes = [event["codes"] for event in sabotaged.history.launcher if event["event"] == "failed"]
    assert -9 in codes[0]
    assert codes[1] == [143, 143]
    assert "is not restored, but the checkpoint before it" in sabotaged.output
    violations = faults.job_violations(sabotaged.history, undisturbed.history, deadline=20.0)
    assert [x for x in violations if "was complete before" not in x] == []  # the damage is its own


def test_a_language_model_in_four_stages(start: Start) -> None:
    """All schedules are in the tests of pipelines."""
    done = start("pipeline.py", "--micro-batches", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1f1b: 4 stages, 5 micro batches")
    found = [float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(found) == 4
    assert found[-1] < found[0] < 4


@pytest.mark.soak  # tests/train/test_elastic.py loses workers, too
def test_a_training_that_loses_a_worker_learns_the_same() -> None:
    def last_loss(command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        (found,) = set(re.findall(r"the last loss is ([\d.]+)", done.stdout))
        return found

    script = str(EXAMPLES / "elastic.py")
    run = [sys.executable, "-m", "phalanx", "run", "--workers", "1:2", "--restarts", "0"]
    lost = last_loss([*run, script, "--lose-at", "10"])
    assert float(lost) == pytest.approx(float(last_loss([sys.executable, script])), abs=1e-4)
