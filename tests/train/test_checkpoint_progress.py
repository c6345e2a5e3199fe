"""The line that says how far a checkpoint is, and how large."""

from __future__ import annotations

import io
import itertools
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import phalanx as px
from phalanx.train.checkpoints import progress


class Terminal(io.StringIO):
    """A stream that people look at."""

    def isatty(self) -> bool:
        return True


def test_saving_and_restoring_show_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each look at the clock takes two seconds here, so that a line is shown."""
    seconds = itertools.count(0.0, 2.0)
    monkeypatch.setattr(
        progress.ProgressLine, "__init__", _with_clock(progress.ProgressLine.__init__, seconds)
    )
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    a, b = (px.Variable(jnp.ones(250_000)) for _ in range(2))
    checkpoint = px.train.Checkpoint(a=a, b=b, key=jax.random.key(0))
    with caplog.at_level(logging.INFO, "phalanx"):
        path = checkpoint.write(str(tmp_path / "x"))
        checkpoint.restore(path).assert_consumed()
    for what in ("Saving x", "Restoring x"):
        (line,) = [text for text in caplog.messages if text.startswith(what)]
        assert "2 MB in" in line
        assert line in shown.getvalue(), repr(shown.getvalue())
        assert f"\r{what}: 50%, 1 MB of 2 MB" in shown.getvalue()


def _with_clock(before, seconds):  # type: ignore[no-untyped-def]
    def init(self, what, total, stream=None, clock=None):  # type: ignore[no-untyped-def]
        before(self, what, total, stream, lambda: next(seconds))

    return init
