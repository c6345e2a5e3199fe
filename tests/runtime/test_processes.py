"""What native code prints, led elsewhere, the priority of threads, and what processes compute."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading

import pytest

from phalanx.runtime.processes import cpu_seconds, lower_priority, redirected


def test_a_descriptor_is_redirected_and_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryFile() as file:
        with contextlib.suppress(ZeroDivisionError), redirected(1, file.fileno()):
            os.write(1, b"elsewhere")
            raise ZeroDivisionError
        os.write(1, b"here")
        file.seek(0)
        assert file.read() == b"elsewhere"
    assert capfd.readouterr().out == "here"


def test_a_descriptor_that_is_not_there_stays_so() -> None:
    free = os.dup(1)
    os.close(free)
    with redirected(free, 1):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(free)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux only")
def test_only_this_thread_has_a_lower_priority() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    found: list[int] = []

    def run() -> None:
        lower_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="seen on Linux only")
def test_a_process_computes_whatever_its_name_is() -> None:
    """The kernel cuts names after 15 bytes, maybe inside a character, and they may have brackets."""
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'tr) 1 \\xc3'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = cpu_seconds(process.pid)
    assert used is not None
    assert 0 <= used < 60
