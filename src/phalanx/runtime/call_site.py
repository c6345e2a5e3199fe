"""Where in the user's program a call was made.

Merge points of different replicas belong together if the user's code reached them the same way. That
way is the chain of call positions from the replica function down to the merge point, with the
frames of Phalanx and JAX left out.

People are shown one line: the innermost one of their own program. Libraries, Python's own among them,
are not theirs. Where a thread runs no line of the user, as those that Phalanx starts, it is the line at
which the main thread is.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType, TracebackType

from phalanx.runtime.thread_stacks import Place, thread_stacks

UNKNOWN = "an unknown place"


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    origin = None if spec is None else spec.origin
    return os.path.dirname(os.path.abspath(origin)) + os.sep if origin else ""


_PHALANX = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HIDDEN = tuple(path for path in (_PHALANX, _folder("jax"), _folder("jaxlib")) if path)
# The demo and the public test helpers are programs that use Phalanx, not a part of its machinery.
_SHOWN = tuple(_PHALANX + name + os.sep for name in ("cli", "testing"))


def _folders(*paths: str | None) -> tuple[str, ...]:
    known = {os.path.abspath(path) for path in paths if path}
    return tuple(sorted({spelling + os.sep for p in known for spelling in (p, os.path.realpath(p))}))


_PYTHON = (*_folders(*map(sysconfig.get_path, ("stdlib", "platstdlib"))), "<frozen ")
_PACKAGES = _folders(
    *map(sysconfig.get_path, ("purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
_LIBRARIES = (*_PYTHON, *_PACKAGES)


@dataclass(frozen=True, eq=False)
class CallSite:
    """A position in the user's program; sites compare equal if they were reached the same way."""

    path: tuple[tuple[CodeType, int], ...] = field(repr=False)
    text: str

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CallSite):
            return NotImplemented
        if self.path == other.path:
            return True
        # The compiler may copy a call into several branches, as the one in `f(a if c else b)`. The
        # copies have offsets of their own, but one position in the source.
        return [_position(*step) for step in self.path] == [_position(*step) for step in other.path]

    __hash__ = None  # type: ignore[assignment]


def _position(code: CodeType, offset: int) -> tuple[CodeType, object]:
    """A call in the source: its first and last line and column, or its offset if they are unknown."""
    found = next(itertools.islice(code.co_positions(), offset // 2, None), (None,))
    return code, offset if None in found else found


def call_site(until: CodeType) -> CallSite:
    """The position of the caller, up to the frame that runs `until`."""
    path: list[tuple[CodeType, int]] = []
    start = sys._getframe(1)
    frame: FrameType | None = start
    while frame is not None and frame.f_code is not until:
        if not is_internal(frame.f_code.co_filename):
            path.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return CallSite(tuple(path), _users_line(start))


def caller() -> str:
    """The user's line that is being executed by this thread, as text."""
    return _users_line(sys._getframe(1))


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user from a frame on, as `caller` has it; None if there is none."""
    return _innermost(frame, is_users) or _innermost(frame, _is_shown)


def describe(frame: FrameType) -> str:
    """A frame as ``file:line in function``."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def where_is(thread_id: int | None) -> str:
    """The user's line that another thread is executing, for messages about who is late."""
    stacks = thread_stacks()
    return _users_place(stacks.get(thread_id or 0, []), stacks)


def lines_of(names: tuple[str, ...]) -> list[str]:
    """The user's lines that threads are executing whose names begin so; without those that run none."""
    stacks = thread_stacks()
    chosen = [stacks.get(t.ident or 0, []) for t in threading.enumerate() if t.name.startswith(names)]
    return sorted({str(place) for places in chosen if (place := _first(places, is_users))})


def describe_traceback(traceback: TracebackType | None) -> str:
    """The innermost line of the user's code in a traceback."""
    users = theirs = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        text = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}"
        if is_users(code.co_filename):
            users = text
        elif _is_shown(code.co_filename) or _is_foreign(code.co_filename):
            theirs = text
        traceback = traceback.tb_next
    return users or theirs or UNKNOWN


@functools.lru_cache(maxsize=4096)
def is_internal(filename: str) -> bool:
    """Whether a file belongs to Phalanx or JAX rather than to the user or to another library."""
    return filename.startswith(_HIDDEN) and not filename.startswith(_SHOWN)


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a file belongs to the user's program rather than to a library."""
    return not filename.startswith((*_HIDDEN, *_LIBRARIES))


def _is_shown(filename: str) -> bool:
    return filename.startswith(_SHOWN)


@functools.lru_cache(maxsize=4096)
def _is_foreign(filename: str) -> bool:
    """Whether a file belongs to an installed package: a program may be installed as one."""
    if filename.startswith(_HIDDEN):
        return False
    return filename.startswith(_PACKAGES) or not filename.startswith(_PYTHON)


def _users_line(frame: FrameType) -> str:
    """The innermost line of the user from a frame of this thread on, else what comes nearest to it."""
    found = users_frame(frame)
    if found is not None:
        return describe(found)
    places = []
    start: FrameType | None = frame
    while start is not None:
        places.append(Place(start.f_code.co_filename, start.f_lineno, start.f_code.co_name))
        start = start.f_back
    return _users_place(places, thread_stacks())


def _users_place(places: list[Place], stacks: dict[int, list[Place]]) -> str:
    """The innermost place of the user where a thread is, else what comes nearest to it."""
    main = stacks.get(threading.main_thread().ident or 0, [])
    rules = (is_users, _is_shown)
    found = _first(places, *rules) or _first(main, *rules)
    found = found or _first(places, _is_foreign) or _first(main, _is_foreign)
    return UNKNOWN if found is None else str(found)


def _first(places: list[Place], *rules: Callable[[str], bool]) -> Place | None:
    """The innermost place for which the first rule holds that holds for any."""
    return next((x for rule in rules for x in places if rule(x.filename)), None)


def _innermost(frame: FrameType | None, rule: Callable[[str], bool]) -> FrameType | None:
    while frame is not None and not rule(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
