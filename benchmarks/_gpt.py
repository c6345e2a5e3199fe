"""A small GPT in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def parameters(blocks: int, width: int, vocabulary: int) -> dict[str, Any]:
    def norm() -> dict[str, Any]:
        return {"scale": array(width), "shift": array(width)}

    def block() -> dict[str, Any]:
        return {
            "before_attention": norm(),
            "query": array(width, width),
            "key": array(width, width),
            "value": array(width, width),
            "out": array(width, width),
            "before_mlp": norm(),
            "up": array(width, 4 * width),
            "up_bias": array(4 * width),
            "down": array(4 * width, width),
            "down_bias": array(width),
        }

    return {
        "embedding": array(vocabulary, width),
        "blocks": [block() for _ in range(blocks)],
        "last": norm(),
        "head": array(width, vocabulary),
    }


def normalised(x: jax.Array, p: Any) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"]


def block(x: jax.Array, p: Any, heads: int) -> jax.Array:
    batch, length, width = x.shape
    h = normalised(x, p["before_attention"])
    q, k, v = ((h @ p[n]).reshape(batch, length, heads, -1) for n in ("query", "key", "value"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (width // heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(batch, length, width)
    x = x + mixed @ p["out"]
    h = normalised(x, p["before_mlp"])
    return x + jax.nn.gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def loss_of(heads: int) -> Callable[..., jax.Array]:
    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = params["embedding"][tokens]
        for p in params["blocks"]:
            x = block(x, p, heads)
        chances = jax.nn.log_softmax(normalised(x, params["last"]) @ params["head"])
        return -jnp.take_along_axis(chances, targets[..., None], -1).mean()

    return loss


def arguments(
    *, blocks: int = 1, width: int = 64, vocabulary: int = 128, batch: int = 16, length: int = 16
) -> tuple[Any, ...]:
    tokens = array(batch, length, dtype=jnp.int32)
    return parameters(blocks, width, vocabulary), tokens, tokens
