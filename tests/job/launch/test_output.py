"""Lines out of bytes, and the reason of a failure out of lines."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from phalanx.job.launch.output import (
    AGE_SECONDS,
    IDLE_SECONDS,
    LINE_LIMIT,
    LineSplitter,
    Tail,
    failure_report,
    printable,
)

TEXTS = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff", b"\0"])).map(b"".join)


def lines_of(data: bytes, cuts: list[int], overwrite: bool = False) -> list[bytes]:
    splitter = LineSplitter(overwrite)
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    lines: list[bytes] = []
    for begin, end in itertools.pairwise(places):
        lines += splitter.feed(data[begin:end], now=0.0)
    return lines + splitter.flush(now=0.0, force=True)


@given(TEXTS, st.lists(st.integers(0, 30)), st.booleans())
def test_how_the_stream_is_cut_makes_no_difference(
    data: bytes, cuts: list[int], overwrite: bool
) -> None:
    assert lines_of(data, cuts, overwrite) == lines_of(data, [], overwrite)


@given(TEXTS, st.lists(st.integers(0, 30)))
def test_nothing_is_lost(data: bytes, cuts: list[int]) -> None:
    lines = lines_of(data, cuts)
    assert b"".join(lines) == re.sub(rb"[\r\n]", b"", data)
    assert not any(re.search(rb"[\r\n]", line) for line in lines)


@given(st.lists(st.binary(max_size=5).filter(lambda b: not set(b) & set(b"\r\n"))))
def test_lines_come_back_as_they_were(lines: list[bytes]) -> None:
    data = b"".join(line + b"\n" for line in lines)
    assert lines_of(data, []) == lines
    assert lines_of(data.replace(b"\n", b"\r\n"), []) == lines


def test_a_terminal_shows_what_was_written_last() -> None:
    bar = b"\r 10%|#\r 50%|#####\r100%|##########"
    assert lines_of(bar + b"\n", [5, 9], overwrite=True) == [b"100%|##########"]
    assert lines_of(bar + b"\n", [5, 9]) == [b" 10%|#", b" 50%|#####", b"100%|##########"]


def test_text_without_an_end_is_shown_after_a_while() -> None:
    splitter = LineSplitter()
    assert splitter.deadline is None
    assert splitter.feed(b"Continue? ", now=1.0) == []
    assert splitter.deadline == pytest.approx(1.0 + IDLE_SECONDS)
    assert splitter.flush(now=1.0 + IDLE_SECONDS / 2) == []
    assert splitter.flush(now=1.0 + IDLE_SECONDS) == [b"Continue? "]
    assert splitter.deadline is None
    assert splitter.feed(b"\n", now=2.0) == []  # the end of what was shown
    assert splitter.feed(b"\n", now=2.0) == [b""]


def test_text_that_grows_is_shown_when_it_is_old() -> None:
    splitter = LineSplitter()
    times = [0.1 * i for i in range(40)]
    shown = []
    for now in times:
        assert splitter.feed(b".", now) == []
        shown += splitter.flush(now)
    assert len(shown) == int(times[-1] / AGE_SECONDS)
    assert all(len(line) > 15 for line in shown)


def test_lines_of_any_length_are_survived() -> None:
    data = b"x" * (2 * LINE_LIMIT + 5)
    splitter = LineSplitter()
    lines: list[bytes] = []
    for begin in range(0, len(data), 1 << 16):
        lines += splitter.feed(data[begin : begin + (1 << 16)], now=0.0)
    assert max(map(len, lines)) < LINE_LIMIT + (1 << 16)
    lines += splitter.feed(b"\n", now=0.0)
    assert b"".join(lines) == data


@given(st.binary(max_size=40))
def test_any_bytes_can_be_shown_in_a_terminal(data: bytes) -> None:
    text = printable(data)
    plain = re.sub(r"\x1b\[[0-9;:]*m", "", text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", plain.replace("\t", ""))


def test_a_tail_keeps_the_end() -> None:
    tail = Tail(lines=2, width=3)
    for line in (b"one", b"two", b"three"):
        tail.add(line)
    assert tail.lines == ["two", "thr"]


# -- why a worker failed -------------------------------------------------------------------------


def stderr_of(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stderr.splitlines()


def test_the_last_traceback() -> None:
    lines = stderr_of(
        "import logging\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.exception('handled')\n"
        "print('going on', file=__import__('sys').stderr)\n"
        "raise ValueError('the\\nreason')"
    )
    assert "ZeroDivisionError: division by zero" in lines
    report = failure_report(lines)
    assert report[0] == "Traceback (most recent call last):"
    assert report[-2:] == ["ValueError: the", "reason"]
    assert "going on" not in report


def test_chains_of_exceptions_are_whole() -> None:
    lines = ["epoch 1", *stderr_of("try: 1 / 0\nexcept Exception as e: raise ValueError('x') from e")]
    report = failure_report(lines)
    assert report == lines[1:]
    assert report[-1] == "ValueError: x"
    assert "ZeroDivisionError: division by zero" in report


def test_groups_of_exceptions() -> None:
    lines = stderr_of("raise ExceptionGroup('many', [ValueError('a'), TypeError('b')])")
    assert failure_report(["before", *lines]) == lines


def test_a_traceback_that_is_quoted_in_a_message() -> None:
    lines = stderr_of(
        "raise RuntimeError('other failed\\n\\nTraceback (most recent call last):\\n  x')"
    )
    assert failure_report(["before", *lines]) == lines


def test_exceptions_that_python_ignores_are_not_the_reason() -> None:
    lines = stderr_of(
        "class A:\n"
        "    def __del__(self): raise KeyError('ignored')\n"
        "a = A()\n"
        "raise ValueError('reason')"
    )
    assert any("KeyError" in line for line in lines)
    assert "ValueError: reason" in failure_report(lines)


def test_the_interpreter_itself_fails() -> None:
    lines = stderr_of("import faulthandler, os; faulthandler.enable(); os.abort()")
    report = failure_report(["before", *lines])
    assert report[0] == "Fatal Python error: Aborted"


def test_threads_are_named() -> None:
    lines = stderr_of("import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()")
    assert failure_report(["before", *lines])[0].startswith("Exception in thread")


def test_without_a_traceback_the_last_lines() -> None:
    lines = [f"line {i}" for i in range(100)]
    assert failure_report(lines) == lines[-20:]
    assert failure_report([]) == []


def test_very_long_reports_are_cut_in_the_middle() -> None:
    report = failure_report(["Traceback (most recent call last):", *map(str, range(900)), "End: x"])
    assert report[0].startswith("Traceback")
    assert report[-1] == "End: x"
    assert len(report) == 201
