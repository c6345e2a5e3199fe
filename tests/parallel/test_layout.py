"""Layouts and their PartitionSpecs."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import phalanx as px
from phalanx.parallel.layout import (
    NONE,
    PARTIAL,
    cuts,
    fits,
    from_spec,
    layouts,
    pieces,
    summed,
    to_spec,
)

NAMES = ("x", "y", "z")
SHAPES = st.lists(st.sampled_from([1, 2, 4, 6, 8, 12]), max_size=4).map(tuple)
SIZES = st.lists(st.sampled_from([2, 3, 4]), max_size=3).map(tuple)


@given(SHAPES, SIZES)
def test_layouts_are_all_that_fit_and_survive_as_specs(
    shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    names = NAMES[: len(sizes)]
    found = layouts(shape, sizes)
    assert len(set(found)) == len(found)
    assert (NONE,) * len(sizes) in found
    for layout in found:
        counts = cuts(layout, sizes, len(shape))
        assert all(size % count == 0 for size, count in zip(shape, counts, strict=True))
        spec = to_spec(layout, names, len(shape))
        assert from_spec(spec, names, shape, sizes) == layout


def test_partial_layouts() -> None:
    found = layouts((4,), (2, 2), partial=True)
    assert len(found) == 9
    assert summed((PARTIAL, 0)) == (NONE, 0)
    assert pieces((PARTIAL, 0), (2, 4)) == 4
    assert not fits((0, 0), (6,), (2, 2))
    assert to_spec((0, 0), ("x", "y"), 2) == P(("x", "y"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (P("w"), "Received: 'w'"),
        (P("x", "x"), "twice"),
        (P(None, None, "x"), "Received: a layout of 3"),
        (P(("y", "x")), "in the order of the mesh"),
        (P(None, "x"), "divisible"),
        ("x", "A layout is"),
    ],
)
def test_bad_specs(spec: object, words: str) -> None:
    with pytest.raises(px.errors.InvalidValueError, match=words):
        from_spec(spec, ("x", "y"), (8, 3), (2, 4))
