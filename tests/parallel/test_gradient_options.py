"""What each option of gradients and of parallel optimizers changes in the program, and in no number."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.parallel.models import after, batch, check_close, mlp, mlp_parameters

from phalanx.errors import InvalidValueError
from phalanx.parallel import parallelize, value_and_grad

PARAMS = mlp_parameters(8, 24, 4)
BATCHES = [batch(24, 8, seed=1), batch(24, 8, seed=2), batch(10, 8, seed=3)]
AUTO = "semi_auto_parallel"
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))
_COLLECTIVE = re.compile(
    r'"stablehlo\.(all_reduce|reduce_scatter|all_gather)".*?: \(tensor<([^>]*)>\)', re.S
)


def step(state: Any, x: Any, y: Any, pieces: int = 1) -> Any:
    """A step whose update needs the norm of all gradients."""
    params, slots = state
    loss, gradients = value_and_grad(mlp, micro_batches=pieces)(params, x, y)
    updates, slots = CLIPPED.update(gradients, slots, params)
    return (optax.apply_updates(params, updates), slots), loss


STATE = PARAMS, CLIPPED.init(PARAMS)


@functools.cache
def expected() -> Any:
    return after(jax.jit(step), STATE, BATCHES)


def sharded(level: str, pieces: int = 1, size: int = -1, **options: Any) -> Any:
    """A step on four devices, each of which keeps a part of the state."""
    config = {"parallel_optimizer_threshold": 0, "optimizer_level": level}
    return parallelize(
        functools.partial(step, pieces=pieces),
        (STATE, *BATCHES[0]),
        devices=jax.devices()[:4],
        parallel_mode="data_parallel",
        gradients_mean=True,
        enable_parallel_optimizer=True,
        parallel_optimizer_config=config,
        optimizer_weight_shard_size=size,
        **options,
    )


def collectives(program: Any, *args: Any) -> list[tuple[str, str]]:
    """What a program communicates, with the types of operands, before XLA merges any."""
    return _COLLECTIVE.findall(program.lower(*args).as_text())


def count(program: Any, kind: str) -> int:
    return [name for name, _ in collectives(program, STATE, *BATCHES[0])].count(kind)


@pytest.mark.parametrize(
    ("level", "size", "kinds"),
    [
        ("level1", -1, {"all_gather": 1, "reduce_scatter": 0}),
        ("level2", -1, {"all_gather": 1, "reduce_scatter": 1}),
        ("level3", -1, {"all_gather": 2, "reduce_scatter": 1}),  # once more for the gradient
        ("level3", 2, {"all_gather": 2, "reduce_scatter": 1}),
    ],
)
def test_a_parallel_optimizer_in_data_parallel(level: str, size: int, kinds: dict[str, int]) -> None:
    """Steps, of which the last has a batch that cannot be divided, equal those of one device."""
    program = sharded(level, size=size)
    state, losses = after(program, STATE, BATCHES)
    check_close((state, losses), expected())
    for tree in (state[0], state[1][1][0].mu):
        parts = {s.data.shape for s in tree["down"].addressable_shards}
        assert parts == {(12, 4) if size == 2 else (6, 4)}
    assert {kind: count(program, kind) for kind in kinds} == kinds
    held = program.lower(STATE, *BATCHES[0]).compile().memory_analysis().argument_size_in_bytes
    whole = sum(x.nbytes for x in jax.tree.leaves(STATE) if np.ndim(x))
    rows = sum(x.nbytes for x in BATCHES[0]) // 4
    assert held - rows - 4 == whole // (2 if size == 2 else 4)  # and the number of updates


def test_small_state_stays_whole_and_groups_must_fit() -> None:
    args = (STATE, *BATCHES[0])
    where: Any = {"parallel_mode": "data_parallel", "enable_parallel_optimizer": True}
    small = parallelize(step, args, devices=jax.devices()[:4], **where)
    assert "all_gather" not in {kind for kind, _ in collectives(small, *args)}
    with pytest.raises(InvalidValueError, match="shard_size must divide"):
        parallelize(
            step, args, devices=jax.devices()[:4], optimizer_weight_shard_size=3, device_num=4, **where
        )


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel", "auto_parallel"])
def test_batches_in_pieces(mode: str) -> None:
    program = parallelize(
        functools.partial(step, pieces=3),
        (STATE, *BATCHES[0]),
        devices=jax.devices()[:2],
        parallel_mode=mode,
        gradients_mean=True,
    )
    check_close(after(program, STATE, BATCHES[:2])[1], expected()[1][:2])
    assert "while" in program.lower(STATE, *BATCHES[0]).as_text()
    with pytest.raises(InvalidValueError, match="has_aux=True and micro_batches=2"):
        value_and_grad(mlp, has_aux=True, micro_batches=2)


def test_gradient_accumulation_shard() -> None:
    """Slices of sums are added up, so there is a sum in the loop: one for each piece."""
    early, late = sharded("level2", 3), sharded("level1", 3)
    check_close(after(early, STATE, BATCHES[:2])[1], expected()[1][:2])
    check_close(after(late, STATE, BATCHES[:2])[1], expected()[1][:2])

    # The program has the first piece, and a loop over the others.
    assert count(early, "reduce_scatter") == 2
    assert count(late, "all_reduce") == count(sharded("level1"), "all_reduce")
    cut = {}
    for shard in (False, True):
        program = parallelize(
            functools.partial(step, pieces=3),
            (STATE, *BATCHES[0]),
            devices=jax.devices()[:4],
            parallel_mode="semi_auto_parallel",
            enable_parallel_optimizer=True,
            gradients_mean=True,
            parallel_optimizer_config={
                "parallel_optimizer_threshold": 0,
                **({"gradient_accumulation_shard": True} if shard else {}),
            },
        )
        cut[shard] = program.lower(STATE, *BATCHES[0]).as_text().count("sharding_constraint")
    assert cut[True] > cut[False]


def test_fusion_of_slices() -> None:
    def number(kind: str, **fusion: Any) -> int:
        return count(sharded("level2", comm_fusion=fusion), kind)

    assert number("all_gather") == number("reduce_scatter") == 1
    alone = {"mode": "size", "config": 0}
    assert number("all_gather", allgather=alone) == 3
    assert number("reduce_scatter", allgather=alone) == 1
    assert number("reduce_scatter", reducescatter=alone) == 3
    assert number("all_gather", openstate=False) == 3


def wide_products(text: str) -> int:
    """How many matrix products of a program give 32 bits: here, those of gradients only may."""
    results = [line.rpartition("->")[2] for line in text.splitlines() if "dot_general" in line]
    return sum("xf32>" in result for result in results)


def test_gradient_fp32_sync() -> None:
    """Gradients of 16 bits are summed in 32, unless that is switched off."""
    w, x = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((8, 8), jnp.bfloat16)

    def run(w: Any, x: Any) -> Any:
        return value_and_grad(lambda w, x: jnp.sum(x @ w))(w, x)

    def program(mode: str, wide: bool, **options: Any) -> Any:
        return parallelize(run, (w, x), parallel_mode=mode, gradient_fp32_sync=wide, **options)

    for wide in (True, False):
        found = collectives(program("data_parallel", wide), w, x)
        assert any("bf16" in operand for _, operand in found) != wide
        for mode in ("semi_auto_parallel", "auto_parallel"):
            text = program(mode, wide).lower(w, x).as_text()
            assert wide_products(text) == wide

    def cast(w: Any, x: Any) -> Any:  # a parameter of 32 bits that is used in 16
        return value_and_grad(lambda w, x: jnp.sum(x @ w.astype(jnp.bfloat16)))(w, x)

    wide = w.astype(jnp.float32)
    for sync in (True, False):
        net = parallelize(cast, (wide, x), parallel_mode=AUTO, gradient_fp32_sync=sync)
        assert wide_products(net.lower(wide, x).as_text()) == sync


def in_loop(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.fori_loop(0, 2, lambda _, c: jnp.tanh(c @ w), x))


def in_layers(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda c, v: (jnp.tanh(c @ v), None), x, jnp.stack([w, w]))[0])


def in_block(w: Any, x: Any) -> Any:
    return jnp.sum(jax.checkpoint(lambda w: jnp.tanh(x @ w) @ w)(w))


def in_branch(w: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda w: jnp.sum(x @ w), lambda w: jnp.sum(x @ w @ w), w)


@pytest.mark.parametrize(
    ("loss", "count"), [(in_loop, 1), (in_layers, 1), (in_block, 2), (in_branch, 3)]
)
def test_gradient_fp32_sync_inside_functions(loss: Any, count: int) -> None:
    """In the rounds of loops, in blocks that are computed again, and in branches."""
    w, x = jnp.ones((8, 8), jnp.bfloat16) / 8, jnp.ones((16, 8), jnp.bfloat16)
    where: Any = {"parallel_mode": "semi_auto_parallel", "devices": jax.devices()[:2]}
    run = value_and_grad(loss)
    for sync in (True, False):
        program = parallelize(run, (w, x), gradient_fp32_sync=sync, **where)
        lines = program.lower(w, x).as_text().splitlines()
        products = [line for line in lines if "dot_general" in line]
        assert sum("-> tensor<8x8xf32>" in line for line in products) == count * sync
        value, gradient = program(w, x)
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_allclose(value, run(w, x)[0], rtol=0.02)
        np.testing.assert_allclose(np.float32(gradient), np.float32(run(w, x)[1]), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("mode", "factor"), [("data_parallel", 1), ("semi_auto_parallel", 4), ("auto_parallel", 4)]
)
def test_a_loss_that_is_repeated(mode: str, factor: int) -> None:
    """MindSpore counts a loss that all devices have once for each, if it is told to."""
    args = (PARAMS, *BATCHES[0])
    _, gradients = jax.value_and_grad(mlp)(*args)
    where: Any = {"devices": jax.devices()[:4], "parallel_mode": mode, "gradients_mean": True}
    program = parallelize(mlp, args, loss_repeated_mean=False, **where)
    found = program.value_and_grad(*args)[1]
    check_close(found, jax.tree.map(lambda g: g * factor, gradients))


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_local_norms(mode: str, capfd: Any, tmp_path: Path) -> None:
    args = ({"w": np.ones((4, 2), np.float32)}, np.arange(16, dtype=np.float32).reshape(4, 4))

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(x @ params["w"])

    where: Any = {"devices": jax.devices()[:2], "parallel_mode": mode}
    program = parallelize(loss, args, dump_local_norm=True, **where)
    program.value_and_grad(*args)
    jax.effects_barrier()
    x = args[1]
    halves = [np.repeat(part.sum(0)[:, None], 2, 1) for part in (x[:2], x[2:])]
    norms = [np.linalg.norm(g) for g in (halves if mode == "data_parallel" else [sum(halves)] * 2)]
    found = dict(re.findall(r"local norm of w on device (\d): ([\d.]+)", capfd.readouterr().out))
    assert [float(found[str(i)]) for i in range(2)] == pytest.approx(norms, rel=1e-4)
    program = parallelize(
        loss, args, dump_device_local_norm=True, dump_local_norm_path=str(tmp_path / "norms"), **where
    )
    program.value_and_grad(*args)
    jax.effects_barrier()
    lines = [
        (tmp_path / "norms" / f"rank_{i}_local_norm.txt").read_text().split("\t") for i in range(2)
    ]
    assert [name for name, _ in lines] == ["all gradients"] * 2
    assert [float(norm) for _, norm in lines] == pytest.approx(norms, rel=1e-4)


def test_parameters_are_broadcast_before_the_first_step() -> None:
    devices = tuple(jax.devices()[:2])
    args = ({"w": np.ones(2, np.float32)}, np.ones((4, 2), np.float32))

    def run(params: Any, x: Any) -> Any:
        return params, jnp.sum(x * params["w"])

    found = {}
    for broadcast in (False, True):
        program = parallelize(
            run, args, devices=devices, parallel_mode="data_parallel", parameter_broadcast=broadcast
        )
        sharding = program.arguments[0]["w"]
        different = [jax.device_put(np.full(2, 1.0 + i, np.float32), d) for i, d in enumerate(devices)]
        w = jax.make_array_from_single_device_arrays((2,), sharding, different)
        found[broadcast] = float(program({"w": w}, args[1])[1])
    assert found == {False: 4.0 + 8.0, True: 4.0 + 4.0}
