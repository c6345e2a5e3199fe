"""Programs that do not come back: they can be left, and the process ends as its program wants."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

PROGRAM = """
import ctypes, sys
from phalanx.runtime.awaiting import Waiter

class Stuck:
    def block_until_ready(self):
        ctypes.CDLL(None).usleep(SECONDS * 1000000)

def look():
    raise OSError("the job has failed")

try:
    Waiter().wait(Stuck(), look)
except OSError as error:
    print(error)
END
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the C library of GNU")
@pytest.mark.parametrize(
    ("end", "code", "seconds"),
    [
        ("sys.exit(7)", 7, 600),
        ("raise KeyError('its own')", 1, 600),
        ("import atexit, time; atexit._run_exitfuncs(); time.sleep(2)", 0, 3),  # it would come back
    ],
)
def test_a_process_with_a_thread_in_native_code_ends_with_its_own_code(
    end: str, code: int, seconds: int
) -> None:
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("END", end).replace("SECONDS", str(seconds))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == "the job has failed\n"
    assert ("its own" in ended.stderr) == (code == 1)
    assert "phalanx:" not in ended.stderr
    assert time.monotonic() - begun < 30.0, "it waits for the thread"
