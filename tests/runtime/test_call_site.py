"""The line that people are shown is one of their own, whoever calls Phalanx for them."""

from __future__ import annotations

import contextlib
import functools
import os
import sysconfig
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

import phalanx
from phalanx.runtime.call_site import UNKNOWN, CallSite, caller, describe_traceback, where_is

PHALANX = os.path.dirname(phalanx.__file__)
LIBRARY = os.path.join(sysconfig.get_path("purelib"), "some_package", "module.py")


def as_if_in(path: str, source: str, **known: Any) -> Any:
    """The function `f` of code that stands in a file."""
    scope: dict[str, Any] = dict(known)
    exec(compile(source, path, "exec"), scope)
    return scope["f"]


entry = as_if_in(f"{PHALANX}/core/entry.py", "def f(*args):\n    return caller()", caller=caller)
managed = as_if_in(
    f"{PHALANX}/core/entry.py",
    "@contextmanager\ndef f():\n    yield caller()",
    caller=caller,
    contextmanager=contextlib.contextmanager,
)
through = as_if_in(LIBRARY, "def f(call):\n    return call()")


def in_a_context() -> str:
    with managed() as site:
        return str(site)


def in_a_thread_of_its_own() -> str:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(entry).result()


WAYS: dict[str, Callable[[], Any]] = {
    "directly": lambda: entry(),  # noqa: PLW0108 - it must be a line of this file
    "contextlib": in_a_context,
    "functools": lambda: functools.reduce(lambda x, y: entry(), [1, 2]),
    "a package": lambda: through(entry),
    "jax": lambda: jax.tree.map(entry, [1])[0],
    "sorted": lambda: (sites := [], sorted([1, 2], key=lambda x: sites.append(entry()) or x))[0][0],
    "a thread": in_a_thread_of_its_own,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_callers_line_is_the_users(way: str) -> None:
    assert f"{__file__}:" in WAYS[way]()


@contextlib.contextmanager
def waiting(wait: Callable[[threading.Event], Any]) -> Iterator[threading.Thread]:
    over = threading.Event()
    thread = threading.Thread(target=wait, args=(over,))
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join(10.0)


def own_wait(over: threading.Event) -> None:
    over.wait(10.0)


def test_the_line_of_another_thread() -> None:
    with waiting(own_wait) as thread:
        while "in own_wait" not in where_is(thread.ident):
            assert thread.is_alive()


def test_a_thread_without_a_line_of_the_user_is_where_the_main_thread_is() -> None:
    with waiting(threading.Event.wait) as thread:
        assert "in test_a_thread_without_a_line" in where_is(thread.ident)


def test_the_users_line_of_a_traceback() -> None:
    fail = as_if_in(LIBRARY, "def f():\n    raise ValueError")
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - it has no text
        fail()
    assert "in test_the_users_line_of_a_traceback" in describe_traceback(raised.value.__traceback__)
    assert describe_traceback(None) == UNKNOWN


# -- comparing ---------------------------------------------------------------------------------------


def program(x: float) -> tuple[int, int]:
    return int(x), int(x)


def places() -> list[tuple[CallSite, tuple[int | None, ...]]]:
    """Every instruction of a function, with its position in the source."""
    code = program.__code__
    return [(CallSite(((code, 2 * i),), ""), p) for i, p in enumerate(code.co_positions())]


def test_copies_of_one_call_are_one_place() -> None:
    found = places()
    alike = [(a, b) for a, p in found for b, q in found if p == q and a is not b and None not in p]
    assert alike
    assert all(a == b for a, b in alike)


def test_two_calls_on_one_line_are_two_places() -> None:
    calls = {p: site for site, p in places() if p[0] == p[1] and None not in p and p[3] - p[2] == 6}  # type: ignore[operator]
    first, second = calls.values()
    assert first != second


def test_instructions_without_a_position_are_told_apart_by_their_offset() -> None:
    code = program.__code__.replace(co_linetable=b"")
    assert CallSite(((code, 2),), "") != CallSite(((code, 4),), "")
