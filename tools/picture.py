"""Draws the picture of the README: the loss of `phalanx demo` on one replica and on several.

    python tools/picture.py [FILE]

It trains on scikit-learn's digits with each number of replicas, and writes an SVG file. A run that
learned something else would show as another line.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress, TextColumn

import phalanx as px
from phalanx.cli.demo import TrainingResult, load_digits, train

FILE = Path(__file__).resolve().parents[1] / "docs" / "images" / "demo.svg"
REPLICAS = (1, 2, 4, 8)
EPOCHS = 15

# The wide lines are drawn first, so that lines on one another are all seen.
LOOKS = (("#b6d7f2", 15), ("#6baed6", 9), ("#f5a742", 4.5), ("#8c1c13", 1.4))
WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 64, 250, 46, 52  # the margins of the plot
TICKS = (1.0, 0.3, 0.1, 0.03)


def measure(replicas: int) -> TrainingResult:
    """Train as the demo does."""
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    columns = (TextColumn("{task.description}"), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, transient=True) as progress:
        return train(strategy, load_digits(), EPOCHS, progress)


def place(epoch: int, loss: float) -> tuple[float, float]:
    """Where a point of the plot is; losses are on a logarithmic scale."""
    x = LEFT + (WIDTH - LEFT - RIGHT) * epoch / (EPOCHS - 1)
    top, bottom = math.log(1.4), math.log(0.02)
    y = TOP + (HEIGHT - TOP - BOTTOM) * (top - math.log(loss)) / (top - bottom)
    return round(x, 1), round(y, 1)


def text(x: float, y: float, words: str, size: int = 13, extra: str = "") -> str:
    """A piece of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" {extra}>{words}</text>'


def drawn(outcomes: Sequence[TrainingResult]) -> str:
    """The picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"',
        'font-family="sans-serif" fill="#333" role="img">',
        "<title>The loss falls in the same way on one, two, four and eight replicas.</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>',
        text(LEFT, 28, "One program, any number of replicas: the mean loss of each epoch", 16),
    ]
    right = WIDTH - RIGHT
    for tick in TICKS:
        _, y = place(0, tick)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick:g}", 12, 'text-anchor="end"'))
    for epoch in range(0, EPOCHS, 2):
        x, _ = place(epoch, 1.0)
        parts.append(text(x, HEIGHT - BOTTOM + 20, str(epoch + 1), 12, 'text-anchor="middle"'))
    parts.append(text((LEFT + right) / 2, HEIGHT - 12, "epoch", 12, 'text-anchor="middle"'))
    for row, (count, outcome, look) in enumerate(zip(REPLICAS, outcomes, LOOKS, strict=True)):
        stroke = f'stroke="{look[0]}" stroke-width="{look[1]}" fill="none" stroke-linejoin="round"'
        points = " ".join(f"{x},{y}" for x, y in map(place, range(EPOCHS), outcome.losses))
        parts.append(f'<polyline points="{points}" {stroke}/>')
        y = TOP + 22 + 40 * row
        parts.append(f'<line x1="{right + 24}" y1="{y}" x2="{right + 62}" y2="{y}" {stroke}/>')
        parts.append(text(right + 74, y - 2, f"{count} replica{'s' if count > 1 else ''}"))
        parts.append(text(right + 74, y + 14, f"test accuracy {outcome.accuracy:.2%}", 11))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Train, draw, write."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    px.config.ensure_cpu_devices(max(REPLICAS))
    picture = drawn([measure(count) for count in REPLICAS])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(picture)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
