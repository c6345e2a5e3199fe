"""What JAX and gloo print while a worker starts."""

from __future__ import annotations

import os

import pytest

from phalanx.job.jax_runtime import _without_greetings


def test_only_the_lines_of_gloo_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with _without_greetings():
        os.write(1, b"[Gloo] Rank 0 is connected.[Gloo] Rank 1 is connected.\n")
        os.write(1, b"\n")
        os.write(1, b"of the program\n")
    assert capfd.readouterr().out == "of the program\n"
