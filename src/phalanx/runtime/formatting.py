"""Values in messages: what a message shows must be short, and must not raise itself."""

from __future__ import annotations

import html
import itertools
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

_LONGEST = 500


class _Showing(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.fillvalue = "…"
        self.maxstring = self.maxother = self.maxlong = _LONGEST
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 20

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers of thousands of digits.
        return super().repr_int(x, level) if x.bit_length() < 4 * _LONGEST else _huge(x)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # In their own order, where reprlib would sort.
        if level <= 0:
            return "{…}" if x else "{}"
        items = [
            f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}"
            for k, v in itertools.islice(x.items(), self.maxdict)
        ]
        return f"{{{', '.join([*items, '…'] if len(x) > self.maxdict else items)}}}"

    def repr_instance(self, x: Any, level: int) -> str:
        try:
            text = repr(x)
        except Exception as error:  # noqa: BLE001 - whatever the user's class does
            return f"<{type(x).__name__} whose repr fails with {type(error).__name__}>"
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _huge(x: int) -> str:
    return f"<{'a negative integer' if x < 0 else 'an integer'} of {x.bit_length()} bits>"


_showing = _Showing()


def shown(x: Any) -> str:
    """The repr of a given value, for a message: bounded, and never an exception.

    Examples:
        >>> shown("8")
        "'8'"
        >>> shown(10**5000)
        '<an integer of 16610 bits>'
    """
    try:
        return _showing.repr(x)
    except Exception as error:  # noqa: BLE001 - whatever the user's class does
        return f"<{type(x).__name__} whose repr fails with {type(error).__name__}>"


def array_text(dtype: Any, shape: Sequence[int]) -> str:
    """An array's dtype and shape.

    >>> array_text("float32", (2, 3))
    'float32[2,3]'
    """
    return f"{dtype}[{','.join(map(str, shape))}]"


def bytes_text(count: float) -> str:
    """An amount of memory with a fitting unit.

    >>> bytes_text(2_500_000)
    '2.5 MB'
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A table for notebooks, with a note below it.

    >>> html_table(["a"], [["<b>"]], "note")
    '<table><tr><th>a</th></tr><tr><td>&lt;b&gt;</td></tr></table><p>note</p>'
    """

    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    below = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<table>{row(heads, 'th') if heads else ''}{body}</table>{below}"
