"""The example scripts run under every strategy and learn the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def losses(script: str, *options: str) -> list[tuple[float, float]]:
    """The loss and the test loss of each epoch, as the script printed them."""
    done = start(script, *options)
    assert done.returncode == 0, done.stderr
    assert "eagerly" not in done.stderr, "the compiled step fell back to the eager executor"
    found = re.findall(r"^epoch \d+: loss ([\d.]+),.* test loss ([\d.]+)", done.stdout, re.MULTILINE)
    return [(float(loss), float(test)) for loss, test in found]


def same(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> bool:
    return len(a) == len(b) and all(x == pytest.approx(y, rel=1e-4) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def of_one_device() -> list[tuple[float, float]]:
    return losses("custom_training_loop.py", "--strategy", "one", "--replicas", "1")


def test_it_learns(of_one_device: list[tuple[float, float]]) -> None:
    assert len(of_one_device) >= 3
    assert of_one_device[-1] < of_one_device[0]


# Each script under one strategy; the contract suite has them all.
@pytest.mark.parametrize(
    ("script", "strategy"), [("custom_training_loop.py", "central"), ("pure_jax.py", "mirrored")]
)
def test_four_replicas_learn_what_one_device_learns(
    script: str, strategy: str, of_one_device: list[tuple[float, float]]
) -> None:
    assert same(losses(script, "--strategy", strategy, "--replicas", "4"), of_one_device)


def test_replicas_must_divide_the_batch() -> None:
    done = start("custom_training_loop.py", "--replicas", "3")
    assert done.returncode == 2
    assert "--replicas" in done.stderr


def test_workers_learn_what_one_process_learns() -> None:
    def epochs(*command: str) -> list[str]:
        script = str(EXAMPLES / "multi_worker.py")
        done = subprocess.run(
            [sys.executable, "-m", *command, script] if command else [sys.executable, script],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return re.findall(r"epoch \d+: loss [\d.]+", done.stdout)

    alone = epochs()
    assert len(alone) == 4
    assert epochs("phalanx", "run", "-n", "2") == alone
