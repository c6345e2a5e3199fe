"""Shows the interactive examples of docstrings as code blocks.

Markdown reads a line that starts with ``>>>`` as three nested quotations. Griffe reads the docstrings
for the reference pages; this extension of it puts a fence around each example.
"""

from __future__ import annotations

from typing import Any

import griffe


class FencedDoctests(griffe.Extension):
    """Puts a fence around each interactive example of a docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object that has been read."""
        del kwargs
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with a fence around each example, which ends at an empty line or at the end."""
    out: list[str] = []
    fence: str | None = None
    for line in [*text.splitlines(), ""]:
        indent = line[: len(line) - len(line.lstrip())]
        if fence is None and line.lstrip().startswith(">>> "):
            fence = indent
            out.append(f"{fence}```pycon")
        elif fence is not None and not line.strip():
            out.append(f"{fence}```")
            fence = None
        out.append(line)
    return "\n".join(out[:-1])
