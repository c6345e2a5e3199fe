"""The table of workers that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_MISSING = ("absent", "dead")
_HEADINGS = ("worker", "host", "phase", "step", "last call", "behind")


class WorkerTable:
    """Who does what, as text (`str`) or for the `rich` package.

    >>> row = {"worker": "worker 0", "host": "a", "pid": 7, "state": "joined", "phase": "step",
    ...        "step": 12, "site": "train.py:8 in step", "behind": 0.0, "quiet": 0.0, "address": "a:1"}
    >>> print(WorkerTable([row]))
    worker    host   phase  step  last call           behind
    worker 0  a (7)  step   12    train.py:8 in step
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = [dict(row) for row in rows]

    def cells(self) -> list[tuple[str, ...]]:
        """The table as texts, without its headings."""
        return [_cells(row) for row in self.rows]

    def __str__(self) -> str:
        lines = [_HEADINGS, *self.cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADINGS))]
        padded = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(line.rstrip() for line in padded)

    def __rich__(self) -> RichTable:
        from rich.table import Table as RichTable

        table = RichTable(*_HEADINGS, box=None, pad_edge=False)
        late = self.late()
        for row, cells in zip(self.rows, self.cells(), strict=True):
            table.add_row(*cells, style="yellow" if row in late else None)
        return table

    def late(self) -> list[dict[str, Any]]:
        """The rows of those that others wait for, the latest first; also of those that are silent."""
        late = [row for row in self.rows if row["behind"] or row["quiet"] or row["state"] in _MISSING]
        return sorted(late, key=lambda row: -row["behind"])


def phase_text(row: Mapping[str, Any]) -> str:
    """What a worker does, where, and for how long."""
    lasts = f" for {row['seconds']:.0f} seconds" if row["seconds"] >= 1 else ""
    site = f" at {row['site']}" if row["site"] else ""
    return f"in phase {row['phase']!r}{lasts}{site}"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    host = f"{row['host']} ({row['pid']})" if row["host"] else row["address"]
    phase = {"joined": row["phase"], "absent": "not there yet", "left": "done"}.get(
        row["state"], "dead"
    )
    if row["quiet"]:
        phase += f" (silent for {row['quiet']:.0f} s)"
    step = "" if row["step"] is None else str(row["step"])
    behind = f"{row['behind']:.1f} s" if row["behind"] > 0 else ""
    return (row["worker"], host, phase, step, row["site"], behind)
