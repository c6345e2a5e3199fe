"""Plans as a web page: one file with all pictures in it, which needs no network and runs no code."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from phalanx.parallel.plan_text import pipeline_rows, proof_text, seconds_text, spec_text
from phalanx.runtime.formatting import bytes_text

if TYPE_CHECKING:
    from phalanx.parallel.plan import Plan, TensorPlan

_COLOURS = ("#4878a8", "#d1884f", "#6a9f58", "#b05c5c", "#8268a8")
_MOST_DEVICES = 64
"""More devices than that are not drawn one by one."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ddd; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
code { font-size: .92em; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
.bar { display: flex; height: 1.6rem; border-radius: 3px; overflow: hidden; background: #eee; }
td .bar { min-width: 10rem; height: 1rem; }
svg text { font: 11px system-ui, sans-serif; }
"""


def page(plan: Plan, title: str = "Plan") -> str:
    """A plan as a web page.

    Args:
        plan: the plan.
        title: what it is a plan for.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        _summary(plan),
        _next_best(plan),
        *_pipeline(plan),
        "<h2>Time per step</h2>",
        _bar({"computation": plan.compute, "communication": plan.communication}, seconds_text),
        "<h2>Memory per device</h2>",
        _bar(
            {
                "parameters": plan.memory.parameters,
                "gradients and optimizer": plan.memory.training,
                "inputs": plan.memory.inputs,
                "kept for gradients": plan.memory.kept,
                "constants": plan.memory.constants,
            },
            bytes_text,
        ),
        "<h2>Devices</h2>",
        _mesh_picture(plan),
        *_tensor_tables(plan),
        *_communication(plan),
    ]
    if plan.notes:
        parts += ["<h2>Notes</h2>", *(f"<p>{escape(note)}</p>" for note in plan.notes)]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n"
    )


def framed(plan: Plan) -> str:
    """A plan for notebooks: its page in a frame, so that its style stays there."""
    return (
        f'<iframe srcdoc="{escape(page(plan), quote=True)}" '
        'style="width: 100%; height: 30rem; border: 1px solid #ccc"></iframe>'
    )


def _summary(plan: Plan) -> str:
    how = proof_text(plan)
    if not plan.proven:
        how += f", and none takes less than {seconds_text(plan.lower_bound)}"
    return (
        f"<p>{escape(str(plan.mesh))} of {escape(plan.hardware)}: "
        f"<b>{seconds_text(plan.cost)}</b> per step, {how} ({escape(plan.mode)}); "
        f"<b>{bytes_text(plan.memory.total)}</b> per device.</p>"
    )


def _pipeline(plan: Plan) -> list[str]:
    """The stages, if there are any."""
    if plan.pipeline is None:
        return []
    title, *rows = pipeline_rows(plan.pipeline)
    table = f"<pre>{escape(chr(10).join(rows))}</pre>"
    picture = f'<div style="overflow-x:auto">{plan.pipeline.picture}</div>'
    return ["<h2>Stages</h2>", f"<p>{escape(title)}</p>", table, picture]


def _next_best(plan: Plan) -> str:
    if plan.runner_up is None:
        return ""
    cost = seconds_text(plan.runner_up.cost)
    return f"<p>Next best: {escape(plan.runner_up.difference)}, {cost} per step.</p>"


def _bar(parts: Mapping[str, float], text: Callable[[float], str]) -> str:
    """Parts of a whole, side by side."""
    total = sum(parts.values()) or 1.0
    used = {name: size for name, size in parts.items() if size}
    colours = dict(zip(parts, itertools.cycle(_COLOURS), strict=False))
    cells = "".join(
        f'<div style="width:{100 * size / total:.3f}%;background:{colours[name]}" '
        f'title="{escape(name)}"></div>'
        for name, size in used.items()
    )
    keys = "".join(
        f'<span class="key" style="background:{colours[name]}"></span>{escape(name)} {text(size)}'
        for name, size in used.items()
    )
    return f'<div class="bar">{cells}</div><p>{keys}</p>'


# -- devices ----------------------------------------------------------------------------------------


def _places(plan: Plan) -> list[tuple[int, ...]]:
    """The coordinates of all devices on the mesh, in their order."""
    return list(itertools.product(*(range(n) for n in plan.mesh.sizes)))


def _mesh_picture(plan: Plan) -> str:
    sizes = plan.mesh.sizes or (1,)
    columns = sizes[-1]
    rows = max(1, plan.mesh.size // columns)
    if plan.mesh.size > _MOST_DEVICES:
        return f"<p>{plan.mesh.size} devices, which are too many to draw.</p>"
    boxes = []
    for i, place in enumerate(_places(plan) or [()]):
        x, y = 8 + (i % columns) * 84, 8 + (i // columns) * 48
        where = " ".join(f"{n}{c}" for n, c in zip(plan.mesh.names, place, strict=True))
        boxes.append(
            f'<rect x="{x}" y="{y}" width="76" height="40" rx="4" fill="#f4f4f4" stroke="#888"/>'
            f'<text x="{x + 38}" y="{y + 17}" text-anchor="middle">device {i}</text>'
            f'<text x="{x + 38}" y="{y + 32}" text-anchor="middle" fill="#666">{escape(where)}</text>'
        )
    width, height = 16 + columns * 84, 16 + rows * 48
    return _svg(width, height, boxes, f"the mesh {plan.mesh}")


def holders(plan: Plan, tensor: TensorPlan) -> list[tuple[int, ...]]:
    """Which slice of a tensor each device holds: its place along each dim."""
    names = plan.mesh.names
    found = []
    for place in _places(plan) or [()]:
        here = dict(zip(names, place, strict=True))
        sizes = dict(zip(names, plan.mesh.sizes, strict=True))
        slices = []
        for axes in tensor.spec:
            listed = () if axes is None else (axes,) if isinstance(axes, str) else axes
            index = 0
            for axis in listed:
                index = index * sizes[axis] + here[axis]
            slices.append(index)
        found.append(tuple(slices))
    return found


def _holders_picture(plan: Plan, tensor: TensorPlan) -> str:
    """A box for each device; those of one colour hold the same slice."""
    if plan.mesh.size > _MOST_DEVICES:
        return ""
    held = holders(plan, tensor)
    kinds = list(dict.fromkeys(held))
    boxes = []
    for i, mine in enumerate(held):
        number = kinds.index(mine)
        hue = round(360 * number / len(kinds))
        colour = "#bbb" if len(kinds) == 1 else f"hsl({hue} 45% {45 + 15 * (number % 2)}%)"
        what = "all of it" if len(kinds) == 1 else f"slice {number}"
        boxes.append(
            f'<rect x="{1 + i * 15}" y="1" width="13" height="13" fill="{colour}">'
            f"<title>device {i}: {what}</title></rect>"
        )
    return _svg(2 + len(held) * 15, 16, boxes, f"who holds which slice of {tensor.name}")


def _svg(width: int, height: int, shapes: Iterable[str], label: str) -> str:
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{"".join(shapes)}</svg>'
    )


# -- tables -----------------------------------------------------------------------------------------


def _tensor_tables(plan: Plan) -> list[str]:
    parts = []
    for title, tensors in (
        ("Parameters", plan.parameters),
        ("Inputs", plan.inputs),
        ("Outputs", plan.outputs),
    ):
        if not tensors:
            continue
        rows = [
            [
                f"<code>{escape(t.name)}</code>",
                escape(f"{t.dtype}[{', '.join(map(str, t.shape))}]"),
                escape(spec_text(t.spec)),
                _holders_picture(plan, t),
                bytes_text(t.bytes),
                _alternative(plan, t),
            ]
            for t in tensors.values()
        ]
        names = ["name", "type", "layout", "one colour, one slice", "per device", "another layout"]
        parts += [f"<h2>{title}</h2>", _table(names, rows, numbers={4})]
    return parts


def _alternative(plan: Plan, tensor: TensorPlan) -> str:
    if not tensor.alternatives:
        return ""
    best = tensor.alternatives[0]
    more = (best.cost - plan.cost) / plan.cost if plan.cost else 0.0
    return escape(f"{spec_text(best.spec)}: {more:.1%} slower")


def _communication(plan: Plan) -> list[str]:
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for c in plan.collectives:
        entry = sums[c.phase, c.kind, "·".join(c.axes)]
        for i, x in enumerate((c.count, c.count * c.sent, c.count * c.seconds)):
            entry[i] += x
    if not sums:
        return ["<h2>Communication per step</h2>", "<p>Nothing is communicated.</p>"]
    most = max(seconds for _, _, seconds in sums.values()) or 1.0
    rows = [
        [
            escape(phase),
            escape(kind),
            escape(axes),
            f"{count:g}",
            bytes_text(sent),
            seconds_text(seconds),
            _share(seconds / most),
        ]
        for (phase, kind, axes), (count, sent, seconds) in sums.items()
    ]
    names = ["phase", "operation", "along", "times", "sent", "time", ""]
    return ["<h2>Communication per step</h2>", _table(names, rows, numbers={3, 4, 5})]


def _share(part: float) -> str:
    inner = f'<div style="width:{100 * part:.3f}%;background:{_COLOURS[1]}"></div>'
    return f'<div class="bar">{inner}</div>'


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[int]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        marks = [' class="number"' if i in numbers else "" for i in range(len(cells))]
        return "".join(f"<{tag}{m}>{c}</{tag}>" for m, c in zip(marks, cells, strict=True))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table>\n<tr>{line('th', names)}</tr>\n{body}\n</table>"
