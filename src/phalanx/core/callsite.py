"""Where in the user's program a call was made.

Merge points of different replicas belong together if the user's code reached them the same way. That
way is the chain of call positions from the replica function down to the merge point, with the
frames of Phalanx and JAX left out.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, field
from types import CodeType, FrameType, TracebackType

import jax

import phalanx

_HIDDEN = tuple(
    os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (phalanx, jax)
)
# The demo and the public test helpers are programs that use Phalanx, not a part of its machinery.
_SHOWN = tuple(_HIDDEN[0] + name + os.sep for name in ("cli", "testing"))


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
    text = "an unknown place"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not until:
        if not is_internal(frame.f_code.co_filename):
            if not path:
                text = describe(frame)
            path.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return CallSite(tuple(path), text)


def caller() -> str:
    """The user's line that is being executed by this thread, as text."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return "an unknown place" if frame is None else describe(frame)


def describe(frame: FrameType) -> str:
    """A frame as ``file:line in function``."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def where_is(thread_id: int | None) -> str:
    """The user's line that another thread is executing, for messages about who is late."""
    frame = sys._current_frames().get(thread_id) if thread_id is not None else None
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return "an unknown place" if frame is None else describe(frame)


def describe_traceback(traceback: TracebackType | None) -> str:
    """The innermost line of the user's code in a traceback."""
    text = "an unknown place"
    while traceback is not None:
        if not is_internal(traceback.tb_frame.f_code.co_filename):
            code = traceback.tb_frame.f_code
            text = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return text


def is_internal(filename: str) -> bool:
    """Whether a file belongs to Phalanx or JAX rather than to the user."""
    return filename.startswith(_HIDDEN) and not filename.startswith(_SHOWN)
