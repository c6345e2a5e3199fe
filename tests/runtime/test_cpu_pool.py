"""The size of XLA's CPU thread pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.runtime import cpu_pool

SOURCE = Path(cpu_pool.__file__).parents[2]


def test_what_the_user_has_chosen_stays() -> None:
    environ = {"PJRT_NPROC": "3"}
    cpu_pool.prepare(64, environ)
    assert environ == {"PJRT_NPROC": "3"}


def test_what_a_parent_has_chosen_for_itself_does_not() -> None:
    environ: dict[str, str] = {}
    cpu_pool.prepare(64, environ)
    assert environ["PJRT_NPROC"] == "128"
    cpu_pool.prepare(128, environ)
    assert environ["PJRT_NPROC"] == "256"
    cpu_pool.prepare(1, environ)
    assert "PJRT_NPROC" not in environ


@pytest.mark.parametrize(("given", "found"), [("64", 64), ("", 32), ("x", 32), ("2", 32)])
def test_the_threads_that_jax_has_started_with(
    given: str, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_NPROC", given)
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert cpu_pool.threads(32) == (found, 64)
    assert cpu_pool.threads(1)[1] == 1


@pytest.mark.parametrize("first", ["", "import jax; "])
@pytest.mark.parametrize(
    "setting",
    [("JAX_NUM_CPU_DEVICES", "64"), ("XLA_FLAGS", "--xla_force_host_platform_device_count=64")],
)
def test_importing_prepares_what_the_environment_asks_for(first: str, setting: tuple[str, str]) -> None:
    code = f"{first}import os, phalanx; print(os.environ['PJRT_NPROC'])"
    name, value = setting
    environ = {name: value, "PYTHONPATH": str(SOURCE), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "128\n"
