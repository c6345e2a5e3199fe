"""Running ahead of the devices never kills XLA's CPU client.

Each scenario is a process of its own, with its own number of devices, beside a process that keeps a
core busy: late threads are what makes programs of several devices wait for each other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("stress_program.py")
TIMEOUT = 120.0
REPLICAS = (2, 4, 8, 16)


@pytest.fixture(autouse=True)
def busy_core() -> Iterator[None]:
    """A process that does nothing useful as fast as it can."""
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        hog.kill()
        hog.wait()


def start(*arguments: object, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end, with settings of its own in the environment."""
    # The size of XLA's thread pool is for the number of devices here, not there.
    inherited = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "XLA_FLAGS")}
    try:
        return subprocess.run(
            [sys.executable, str(PROGRAM), *map(str, arguments)],
            env=inherited | settings,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"still running after {TIMEOUT:.0f} s\n{_tail(error.stdout)}{_tail(error.stderr)}")


def run(kind: str, replicas: int, width: int, steps: int, **settings: str) -> None:
    done = start(kind, replicas, width, steps, **settings)
    if done.returncode != 0 or not done.stdout.endswith("done\n"):
        pytest.fail(f"ended with {done.returncode}\n{_tail(done.stdout)}{_tail(done.stderr)}")


def _tail(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return "".join(f"{line}\n" for line in text.splitlines()[-30:])


def test_many_steps_without_waiting() -> None:
    run("compiled", replicas=8, width=64, steps=100)


def test_a_pool_of_threads_that_is_too_small() -> None:
    """As JAX makes it if it starts before Phalanx has any say; results fill its queues, too."""
    run("results", replicas=8, width=256, steps=60, PJRT_NPROC="8")


@pytest.mark.soak
@pytest.mark.parametrize(("width", "steps"), [(64, 400), (512, 200)])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_compiled_steps(replicas: int, width: int, steps: int) -> None:
    run("compiled", replicas, width, steps)


@pytest.mark.soak
@pytest.mark.parametrize(("width", "steps"), [(64, 200), (512, 50)])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_threads_that_each_run_steps(replicas: int, width: int, steps: int) -> None:
    run("threads", replicas, width, steps)


@pytest.mark.soak
@pytest.mark.parametrize("replicas", REPLICAS)
def test_functions_in_rotation(replicas: int) -> None:
    run("rotation", replicas, width=64, steps=400)


@pytest.mark.soak
@pytest.mark.parametrize(("width", "steps"), [(64, 300), (512, 200)])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_eager_collectives(replicas: int, width: int, steps: int) -> None:
    run("eager", replicas, width, steps)


@pytest.mark.soak
@pytest.mark.parametrize(("width", "steps"), [(64, 300), (512, 100)])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_computing_with_results_outside_of_the_library(replicas: int, width: int, steps: int) -> None:
    run("outside", replicas, width, steps)


@pytest.mark.soak
@pytest.mark.parametrize(("width", "steps"), [(64, 400), (512, 200)])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_pure_steps_under_plain_jit(replicas: int, width: int, steps: int) -> None:
    run("plain_jit", replicas, width, steps)


@pytest.mark.soak
def test_without_protection_the_same_steps_do_die() -> None:
    """If this fails, XLA has got better, and the throttle and the larger thread pool can go."""
    done = start("compiled", 8, 512, 200, "unbounded", PJRT_NPROC="8")
    assert done.returncode == -signal.SIGABRT
    assert "rendezvous" in done.stderr.lower()
