"""Meshes and topologies."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, strategies as st

import phalanx as px
from phalanx.parallel.mesh import DeviceMesh, Link, Topology, factorisations, mesh_of, meshes

FAST, SLOW = Link(1e-6, 1e-11), Link(1e-5, 1e-9)


@given(st.integers(1, 200), st.integers(1, 3))
def test_every_ordered_factorisation_comes_once(count: int, most: int) -> None:
    found = list(factorisations(count, most))
    assert len(set(found)) == len(found)
    every = {()} if count == 1 else set()
    factors = [n for n in range(2, count + 1) if count % n == 0]
    every |= {(a,) for a in factors if a == count}
    if most > 1:
        every |= {(a, b) for a in factors for b in factors if a * b == count}
    if most > 2:
        every |= {(a, b, c) for a in factors for b in factors for c in factors if a * b * c == count}
    assert set(found) == every


def test_links_depend_on_whether_a_ring_stays_on_its_host() -> None:
    topology = Topology(2, 4, FAST, SLOW)
    assert mesh_of(topology, (2, 4)).links == (SLOW, FAST)
    assert mesh_of(topology, (4, 2)).links == (SLOW, FAST)
    assert mesh_of(topology, (2, 2, 2)).links == (SLOW, FAST, FAST)
    assert mesh_of(topology, (8,)).links == (SLOW,)
    assert mesh_of(Topology(1, 8, FAST, SLOW), (8,)).links == (FAST,)
    assert mesh_of(Topology(2, 6, FAST, SLOW), (3, 4)).links == (SLOW, SLOW)  # four do not divide six


def test_meshes_that_differ_in_the_order_of_axes_are_tried_once() -> None:
    flat = [mesh.sizes for mesh in meshes(Topology(1, 8, FAST, SLOW))]
    assert flat == [(8,), (2, 4), (2, 2, 2)]
    hosts = [mesh.sizes for mesh in meshes(Topology(2, 4, FAST, SLOW))]
    assert hosts == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert [mesh.sizes for mesh in meshes(Topology(1, 1, FAST, SLOW))] == [()]
    assert all(prod(mesh.sizes) == 12 for mesh in meshes(Topology(1, 12, FAST, SLOW)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(-1, 0), "Received: alpha=-1"),
        (lambda: Topology(0, 4, FAST, SLOW), "Received: hosts=0"),
        (lambda: DeviceMesh(("x", "x"), (2, 2), (FAST, FAST)), "a name of its own"),
        (lambda: DeviceMesh(("a", "b", "c", "d"), (2,) * 4, (FAST,) * 4), "up to 3 axes"),
    ],
)
def test_bad_meshes(make: object, words: str) -> None:
    with pytest.raises(px.errors.InvalidValueError, match=words):
        make()  # type: ignore[operator]
