"""Small models for tests of pipelines: equal stages, different ones, tied ones, and with attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY, WIDTH, LENGTH = 11, 8, 6


@dataclass(frozen=True)
class Model:
    """A model in parts, and the same model whole."""

    parts: Sequence[Any]
    params: list[Any]
    batch: Callable[[int], tuple[Any, ...]]
    loss: Callable[..., Any] | None = None
    shared: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def whole(self, params: list[Any], *batch: Any) -> Any:
        """The loss of a batch on one device."""
        x, *rest = batch
        for i, (part, own) in enumerate(zip(self.parts, params, strict=True)):
            ties = {n: params[where[0]][n] for n, where in self.shared.items() if i in where[1:]}
            given = {**own, **ties} if ties else own
            last = i == len(self.parts) - 1
            x = part(given, x, *rest) if last and self.loss is None else part(given, x)
        return x if self.loss is None else self.loss(x, *rest)

    def trained(self, transform: Any, rows: int, steps: int) -> tuple[list[float], Any]:
        """The losses of some steps on one device, every other with a row less, and the parameters."""
        params, state = self.params, transform.init(self.params)

        @jax.jit
        def step(params: Any, state: Any, *batch: Any) -> Any:
            value, gradients = jax.value_and_grad(self.whole)(params, *batch)
            updates, state = transform.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        losses = []
        for i in range(steps):
            params, state, value = step(params, state, *self.batch(rows - i % 2))
            losses.append(float(value))
        return losses, params


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def layer(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"])


def mse(y: Any, target: Any) -> Any:
    return jnp.mean((y - target) ** 2)


def equal(parts: int, dtype: str = "float32") -> Model:
    """Equal stages and a loss apart."""
    r = random(0)
    params = [
        {
            "w": jnp.asarray(r.normal(size=(WIDTH, WIDTH)) / 3, dtype),
            "b": jnp.zeros(WIDTH, dtype),
        }
        for _ in range(parts)
    ]

    def batch(rows: int) -> tuple[Any, ...]:
        r = random(rows)
        return tuple(np.asarray(r.normal(size=(rows, WIDTH)), dtype) for _ in range(2))

    return Model([layer] * parts, params, batch, mse)


def embed(p: Any, tokens: Any) -> Any:
    return p["embedding"][tokens] + p.get("place", 0.0)


def block(p: Any, x: Any) -> Any:
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def logits(p: Any, x: Any) -> Any:
    return x @ p["embedding"].T


def cross_entropy(y: Any, target: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(y), target[..., None], -1)
    return -jnp.mean(picked)


def language(parts: int, tied: bool = True) -> Model:
    """Different stages: embedding first, loss last, and one matrix that both use."""
    r = random(1)

    def matrix(*shape: int) -> Any:
        return jnp.asarray(r.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    first = {"embedding": matrix(VOCABULARY, WIDTH), "place": matrix(LENGTH, WIDTH)}
    middle = [
        {"up": matrix(WIDTH, 2 * WIDTH), "down": matrix(2 * WIDTH, WIDTH)} for _ in range(parts - 2)
    ]

    def last(p: Any, x: Any, target: Any) -> Any:
        return cross_entropy(logits(p, x * p["scale"]), target)

    end = {"scale": jnp.ones(WIDTH)}
    if not tied:
        end["embedding"] = matrix(VOCABULARY, WIDTH)

    def batch(rows: int) -> tuple[Any, ...]:
        r = random(rows)
        return tuple(r.integers(0, VOCABULARY, (rows, LENGTH)) for _ in range(2))

    shared = {"embedding": (0, parts - 1)} if tied else {}
    return Model([embed, *[block] * (parts - 2), last], [first, *middle, end], batch, None, shared)


def attention(parts: int) -> Model:
    """Layers of causal attention, which look at earlier positions."""
    r = random(2)

    def matrix(*shape: int) -> Any:
        return jnp.asarray(r.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    params = [{name: matrix(WIDTH, WIDTH) for name in "qkv"} for _ in range(parts)]

    def batch(rows: int) -> tuple[Any, ...]:
        r = random(rows)
        return tuple(np.asarray(r.normal(size=(rows, LENGTH, WIDTH)), "float32") for _ in range(2))

    return Model([attend] * parts, params, batch, mse)


def attend(p: Any, x: Any) -> Any:
    return attend_on(p, x, None)[0]


def attend_on(p: Any, x: Any, before: Any) -> tuple[Any, Any]:
    """Attention to this slice and to those before it, whose keys and values are carried."""
    q, k, v = (x @ p[name] for name in "qkv")
    if before is not None:
        k, v = (jnp.concatenate([old, new], 1) for old, new in zip(before, (k, v), strict=True))
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(WIDTH)
    last = k.shape[1] - x.shape[1]
    mask = jnp.arange(k.shape[1])[None, :] <= last + jnp.arange(x.shape[1])[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return x + jnp.einsum("bqk,bkd->bqd", weights, v), (k, v)


def mixed(parts: int, seed: int) -> Model:
    """Stages of random widths and kinds."""
    r = random(seed)
    widths = [WIDTH, *(int(r.integers(3, 7)) for _ in range(parts))]
    kinds = [
        lambda p, x: jnp.tanh(x @ p["w"]),
        lambda p, x: jax.nn.relu(x) @ p["w"] * p["s"],
        lambda p, x: x @ p["w"] + jnp.mean(x, -1, keepdims=True) * p["s"],
    ]
    params = [
        {
            "w": jnp.asarray(r.normal(size=(a, b)) / 2, jnp.float32),
            "s": jnp.asarray(r.normal(size=b), jnp.float32),
        }
        for a, b in itertools.pairwise(widths)
    ]

    def batch(rows: int) -> tuple[Any, ...]:
        r = random(rows)
        return tuple(np.asarray(r.normal(size=(rows, n)), "float32") for n in (WIDTH, widths[-1]))

    return Model([kinds[int(r.integers(3))] for _ in range(parts)], params, batch, mse)


def loops(parts: int) -> Model:
    """Stages that go through their layers in a loop."""
    plain = equal(parts)

    def stage(p: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, own: (layer(own, x), None), x, p)[0]

    stacked = [jax.tree.map(lambda x: jnp.stack([x, x + 0.1]), p) for p in plain.params]
    return Model([stage] * parts, stacked, plain.batch, mse)
