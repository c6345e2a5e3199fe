"""What a compiled program communicates, read from its HLO."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import Any

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "f64": 8,
    "s64": 8,
}
LINE = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(?:-start)?\((.*)")
SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")


def size_of(text: str) -> int:
    """The bytes of all shapes in a text."""
    return sum(
        BYTES[dtype] * prod(int(n) for n in dims.split(",") if n) for dtype, dims in SHAPE.findall(text)
    )


def group_size(line: str, devices: int) -> int:
    """How many devices take part together."""
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(found[2])
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])  # an axis, or a part of it
        return prod(int(part or sizes[axis]) for axis, part in parts)
    return devices


def sent(compiled: Any, devices: int) -> Counter[str]:
    """The bytes that each device sends, by kind of collective, with ring algorithms."""
    totals: Counter[str] = Counter()
    for line in compiled.as_text().splitlines():
        found = LINE.search(line)
        if found is None or "-done" in line.split("=")[1][:60]:
            continue
        result, kind = size_of(found[1]), found[2]
        n = group_size(line, devices)
        part = (n - 1) / n
        each = {
            "all-gather": part * result,
            "all-reduce": 2 * part * result,
            "reduce-scatter": (n - 1) * result,
            "all-to-all": part * result,
            "collective-permute": float(result),
        }[kind]
        totals[kind] += round(each)
    return totals
