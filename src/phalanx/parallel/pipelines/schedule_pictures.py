"""Pictures of schedules: a line of text or a row of boxes for each stage, with time to the right."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.parallel.pipelines.schedule import ActionCosts, PipelineSchedule, TimedAction

__all__ = ["svg", "text"]

_COLOURS = {"F": ("#9ecae1", "#6baed6"), "B": ("#a1d99b", "#74c476"), "W": ("#fdd0a2", "#fdae6b")}
_WIDTH, _HEIGHT, _LEFT = 28, 26, 64


def heading(schedule: PipelineSchedule) -> str:
    """What a schedule is, in one line."""
    parts = [f"{schedule.stages} stages", f"{schedule.micro_batches} micro batches"]
    if schedule.chunks > 1:
        parts.append(f"{schedule.chunks} chunks")
    if schedule.slices > 1:
        parts.append(f"{schedule.slices} slices")
    live = " ".join(map(str, schedule.peak_live))
    return f"{schedule.name}: {', '.join(parts)}, bubble {schedule.bubble():.1%}, live {live}"


def text(schedule: PipelineSchedule) -> str:
    """A line for each stage, in which dots are ticks of waiting.

    >>> from phalanx.parallel.pipelines.named_schedules import schedule
    >>> print(text(schedule("gpipe", 2, 2)))
    gpipe: 2 stages, 2 micro batches, bubble 33.3%, live 2 2
    0 |F0|F1|..|..|..|B0   |B1   |
    1 |..|F0|F1|B0   |B1   |..|..|
    """
    rows: list[list[TimedAction]] = [[] for _ in range(schedule.stages)]
    for timed in schedule.timed():
        rows[timed.stage].append(timed)
    width = max((len(str(t.action)) for row in rows for t in row), default=2)
    whole = int(schedule.latency())
    lines = [heading(schedule)]
    for stage, row in enumerate(rows):
        line, now = f"{stage} |", 0
        for t in row:
            line += f"{'.' * width}|" * (int(t.start) - now)
            ticks = int(t.end) - int(t.start)
            line += str(t.action).ljust(width * ticks + ticks - 1) + "|"
            now = int(t.end)
        lines.append(line + f"{'.' * width}|" * (whole - now))
    return "\n".join(lines)


def svg(schedule: PipelineSchedule, costs: ActionCosts | None = None) -> str:
    """Boxes on a row for each stage: blue forwards, green backwards, orange gradients of weights."""
    timed = schedule.timed(costs)
    whole = max((t.end for t in timed), default=1) or 1
    shortest = min((t.end - t.start for t in timed if t.end > t.start), default=1)
    most = max((len(order) for order in schedule.orders), default=1)
    scale = min(_WIDTH / shortest, 2 * _WIDTH * most / whole)  # one short action makes no wide picture
    height = _HEIGHT * (schedule.stages + 1) + 8
    boxes = []
    for t in timed:
        x, y = _LEFT + t.start * scale, _HEIGHT * (t.stage + 1)
        colour = _COLOURS[t.action.kind][t.action.chunk % 2]
        wide = (t.end - t.start) * scale
        label = escape(f"stage {t.stage}: {t.action}, {t.start:g} to {t.end:g}")
        boxes.append(
            f'<g><title>{label}</title><rect x="{x:g}" y="{y}" width="{wide:g}" height="{_HEIGHT - 4}" '
            f'rx="3" fill="{colour}"/><text x="{x + wide / 2:g}" y="{y + 15}" text-anchor="middle">'
            f"{t.action.micro}</text></g>"
        )
    names = [
        f'<text x="4" y="{_HEIGHT * (stage + 1) + 15}">stage {stage}</text>'
        for stage in range(schedule.stages)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + whole * scale + 8:g}" '
        f'height="{height}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/><text x="4" y="15">{escape(heading(schedule))}'
        f"</text>{''.join(names)}{''.join(boxes)}</svg>"
    )
