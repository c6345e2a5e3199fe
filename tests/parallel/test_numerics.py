"""Every mode, with every level of a parallel optimizer, trains random models as one device does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from tests.parallel.models import MODES, check_close

from phalanx.errors import InvalidOptionsError
from phalanx.parallel import parallelize, value_and_grad

LEVELS = (None, "level1", "level2", "level3")
COUNTS = (2, 4, 6, 8)
WITHOUT_LEVELS = ("stand_alone", "hybrid_parallel")
"""Modes in which MindSpore has no parallel optimizer, and neither has Phalanx."""
CROSS = [
    (mode, level, count)
    for mode, level, count in itertools.product(MODES, LEVELS, COUNTS)
    if level is None or mode not in WITHOUT_LEVELS
]
STEPS = 20
TRANSFORMS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "momentum": lambda: optax.sgd(0.02, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01)),
}
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"tanh": jnp.tanh, "gelu": jax.nn.gelu}


@dataclass(frozen=True)
class Model:
    """A random model: widths may divide by all, some or none of the devices."""

    widths: tuple[int, ...] = (6, 24, 4)
    activation: str = "tanh"
    skips: bool = False
    transform: str = "adam"
    rows: int = 24
    seed: int = 0

    def state(self) -> Any:
        random = np.random.default_rng(self.seed)
        params = [
            {
                "kernel": (random.normal(size=(a, b)) / np.sqrt(a)).astype(np.float32),
                "bias": (random.normal(size=b) / 10).astype(np.float32),
            }
            for a, b in itertools.pairwise(self.widths)
        ]
        return params, TRANSFORMS[self.transform]().init(params)

    def batches(self) -> list[Any]:
        random = np.random.default_rng(self.seed + 1)
        sizes = self.widths[0], self.widths[-1]
        return [
            tuple(random.normal(size=(self.rows, n)).astype(np.float32) for n in sizes)
            for _ in range(2)
        ]

    def loss(self, params: Any, x: Any, y: Any) -> Any:
        for number, layer in enumerate(params):
            out = x @ layer["kernel"] + layer["bias"]
            if number < len(params) - 1:
                out = ACTIVATIONS[self.activation](out)
            x = out + x if self.skips and out.shape == x.shape else out
        return jnp.mean((x - y) ** 2)

    def step(self, state: Any, x: Any, y: Any) -> Any:
        params, slots = state
        loss, gradients = value_and_grad(self.loss)(params, x, y)
        updates, slots = TRANSFORMS[self.transform]().update(gradients, slots, params)
        return (optax.apply_updates(params, updates), slots), loss

    def trained(self, function: Callable[..., Any]) -> Any:
        state, losses, batches = self.state(), [], itertools.cycle(self.batches())
        for x, y in itertools.islice(batches, STEPS):
            state, loss = function(state, x, y)
            losses.append(loss)
        return state, [float(loss) for loss in losses]


def options(mode: str, level: str | None, count: int) -> Any:
    where: Any = {"devices": jax.devices()[:count], "parallel_mode": mode, "gradients_mean": True}
    if level is not None:
        config = {"parallel_optimizer_threshold": 0, "optimizer_level": level}
        where |= {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}
    return where


def check(mode: str, level: str | None, count: int, model: Model, gradients: bool = True) -> None:
    """The loss and its gradients, and twenty steps."""
    where = options(mode, level, count)
    params, *batch = model.state()[0], *model.batches()[0]
    if gradients:
        loss = parallelize(model.loss, (params, *batch), **where)
        expected = jax.value_and_grad(model.loss)(params, *batch)
        check_close(loss.value_and_grad(params, *batch), expected)
    program = parallelize(model.step, (model.state(), *batch), **where)
    found, losses = model.trained(program)
    state, same = model.trained(jax.jit(model.step))
    np.testing.assert_allclose(losses, same, rtol=1e-4, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), found, state)


@pytest.mark.parametrize(
    ("mode", "level", "count"),
    [(m, v, n) for m, v, n in CROSS if COUNTS[(MODES.index(m) + LEVELS.index(v)) % len(COUNTS)] == n],
    ids=str,
)
def test_every_mode_and_level(mode: str, level: str | None, count: int) -> None:
    """Each pair of a mode and a level, on numbers of devices that take turns."""
    number = CROSS.index((mode, level, count))
    widths = ((6, 24, 4), (5, 12, 12, 3), (8, 48, 2))[number % 3]
    transform = list(TRANSFORMS)[number % len(TRANSFORMS)]
    model = Model(widths, "tanh", bool(number % 2), transform, seed=number)
    check(mode, level, count, model, gradients=level is None)  # those of levels are in the soak


@pytest.mark.parametrize("mode", WITHOUT_LEVELS)
def test_modes_without_levels_refuse_them(mode: str) -> None:
    model = Model()
    with pytest.raises(InvalidOptionsError, match="parallel optimizer is not supported"):
        parallelize(model.step, (model.state(), *model.batches()[0]), **options(mode, "level1", 2))


@pytest.mark.soak
@pytest.mark.parametrize(("mode", "level", "count"), CROSS, ids=str)
def test_the_whole_cross_with_random_models(mode: str, level: str | None, count: int) -> None:
    models = st.builds(
        Model,
        st.lists(st.integers(1, 48), min_size=2, max_size=4).map(tuple),
        st.sampled_from(list(ACTIVATIONS)),
        st.booleans(),
        st.sampled_from(list(TRANSFORMS)),
        st.integers(1, 3).map(lambda n: n * 7),
        st.integers(0, 1000),
    )

    @settings(max_examples=3, deadline=None, database=None)
    @given(models)
    def run(model: Model) -> None:
        check(mode, level, count, model)

    run()
