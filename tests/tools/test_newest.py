"""The tool behind `make test-newest`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "newest.py"


def run(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PATH": str(path), **environment}
    return subprocess.run(
        [sys.executable, str(TOOL)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=variables,
    )


def test_it_skips_where_no_interpreter_is_to_be_had(tmp_path: Path) -> None:
    shim = tmp_path / "python3.13"  # on the PATH, but it does not run
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Skipped: there is no newer Python" in done.stderr
    assert "unshare is not installed" in done.stderr


def test_an_interpreter_that_was_given_must_run(tmp_path: Path) -> None:
    done = run(tmp_path, PHALANX_NEWEST_PYTHON=str(tmp_path / "python"))
    assert done.returncode == 1
    assert "Received:" in done.stderr
