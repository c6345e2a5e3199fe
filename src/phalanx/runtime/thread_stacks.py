"""Where other threads are, found without objects of their frames.

Python makes the object of a frame when it is asked for, and the thread that the frame belongs to knows
nothing of it. Python 3.11 may collect garbage in that moment; finalizers then let the other thread run,
and its frames are corrupted. So nothing here asks for frames of other threads: `faulthandler` writes
down where threads are in one piece, while none of them runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Place", "all_stacks", "thread_stacks"]

_HEAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


class Place(NamedTuple):
    """A line of a program that a thread executes."""

    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.line} in {self.function}"


def thread_stacks() -> dict[int, list[Place]]:
    """Where all threads are, by their identity, the innermost place of each first.

    Of a thread there are a hundred places at most, and of threads a hundred, those that were started
    last.

    Examples:
        >>> import threading
        >>> def wait():
        ...     return thread_stacks()[threading.get_ident()]
        >>> [place.function for place in wait()][:2]
        ['thread_stacks', 'wait']
    """
    with _file() as descriptor:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        os.lseek(descriptor, 0, os.SEEK_SET)
        with open(descriptor, "rb", closefd=False) as file:
            return parse_stacks(file.read().decode("ascii", "replace"))


@contextlib.contextmanager
def _file() -> Iterator[int]:
    """A file in memory. A pipe could be full, and the thread that writes would stop all others."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("phalanx-stacks")
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryFile() as file:
            yield file.fileno()


def parse_stacks(text: str) -> dict[int, list[Place]]:
    r"""What `faulthandler` has written.

    Examples:
        >>> text = r'''Thread 0x0a (most recent call first):
        ...   File "a\xe9.py", line 3 in f
        ...   File "b.py", line ??? in <module>
        ...   ...
        ... '''
        >>> parse_stacks(text)[10][0]
        Place(filename='aé.py', line=3, function='f')
        >>> len(parse_stacks(text)[10])
        2
    """
    found: dict[int, list[Place]] = {}
    places: list[Place] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            places = found[int(head[1], 16)] = []
        elif match := _LINE.fullmatch(line):
            number = int(match[2]) if match[2].isdigit() else 0
            places.append(Place(_unescaped(match[1]), number, _unescaped(match[3])))
    return found


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1] or match[2] or match[3], 16)), text)


def all_stacks() -> str:
    """The Python stacks of all threads of this process, except the calling one, with their lines."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, places in sorted(thread_stacks().items()):
        if ident != threading.get_ident():
            lines = "".join(map(_shown, reversed(places)))
            texts.append(f"Thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(texts)


def _shown(place: Place) -> str:
    """A place as tracebacks have it."""
    source = linecache.getline(place.filename, place.line).strip()
    more = f"    {source}\n" if source else ""
    return f'  File "{place.filename}", line {place.line}, in {place.function}\n{more}'
