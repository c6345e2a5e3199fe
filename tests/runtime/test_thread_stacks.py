"""Where other threads are, found without objects of their frames."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phalanx.runtime.call_site import where_is
from phalanx.runtime.thread_stacks import all_stacks, parse_stacks, thread_stacks

STRESS = Path(__file__).with_name("frame_stress.py")


def test_all_threads_are_found_with_their_innermost_place_first() -> None:
    inside, over = threading.Event(), threading.Event()

    def wait_in_a_thread() -> None:
        inside.set()
        over.wait(30.0)

    thread = threading.Thread(target=wait_in_a_thread, name="one that waits")
    thread.start()
    try:
        assert inside.wait(30.0)
        while "over.wait(30.0)" not in all_stacks():
            assert thread.is_alive()
        found = thread_stacks()
        functions = [place.function for place in found[thread.ident or 0]]
        assert functions.index("wait_in_a_thread") < functions.index("run")
        (place,) = [x for x in found[thread.ident or 0] if x.function == "wait_in_a_thread"]
        assert str(place) == where_is(thread.ident)
        text = all_stacks()
        assert "Thread one that waits:\n" in text
        assert (
            f'  File "{__file__}", line {place.line}, in wait_in_a_thread\n    over.wait(30.0)' in text
        )
        assert "test_all_threads_are_found" not in text  # the caller
    finally:
        over.set()
        thread.join(30.0)


def test_no_frame_of_another_thread_gets_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 corrupts frames of threads that run meanwhile."""

    def asked() -> None:
        pytest.fail("frames of other threads were asked for")

    monkeypatch.setattr(sys, "_current_frames", asked)
    assert "in test_no_frame" in where_is(threading.main_thread().ident)
    assert all_stacks() is not None


def test_newer_pythons_name_threads() -> None:
    text = 'Thread 0x00fff [name] (most recent call first):\n  File "x.py", line 7 in <lambda>\n'
    assert parse_stacks(text) == {0xFFF: [("x.py", 7, "<lambda>")]}
    assert parse_stacks("Thread 0x1 (most recent call first):\n  <no Python frame>\n") == {1: []}


@pytest.mark.soak
@pytest.mark.parametrize("walkers", [1, 3])
def test_frames_survive_being_looked_at(walkers: int) -> None:
    """With `sys._current_frames` in its place, this ended with a segmentation fault."""
    command = [sys.executable, str(STRESS), "phalanx", "20", str(walkers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert "survived" in done.stdout
