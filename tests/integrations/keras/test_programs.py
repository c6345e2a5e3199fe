"""Programs in the style of Keras's examples: the same under strategies as on one device."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

import phalanx as px
from tests.integrations.keras.programs import PROGRAMS

STRATEGIES = {
    "mirrored 2": lambda: px.MirroredStrategy(["CPU:0", "CPU:1"]),
    "central 4": lambda: px.CentralStorageStrategy([f"CPU:{i}" for i in range(4)], "CPU:0"),
}


@functools.cache
def on_one_device(name: str) -> Any:
    return PROGRAMS[name]()


# tests/port has a GAN, too.
QUICK = [(name, "mirrored 2") for name in PROGRAMS if name != "gan"]
SLOW = [case for case in itertools.product(PROGRAMS, STRATEGIES) if case not in QUICK]


@pytest.mark.parametrize(
    ("name", "kind"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.soak) for case in SLOW)]
)
def test_a_program_gives_the_same(name: str, kind: str) -> None:
    found = PROGRAMS[name](STRATEGIES[kind]())
    for x, y in zip(found, on_one_device(name), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
