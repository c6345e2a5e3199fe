"""Messages between replicas: as branches where they run eagerly, as permutations where compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from tests.comm.test_replicas import given, runs

c = px.comm


@pytest.fixture(params=["eager", "compiled"])
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("count", [2, 3])
def test_a_ring_whose_peers_are_computed_or_listed(executor: str, count: int) -> None:
    x = given(count)

    def ring(mine: jax.Array) -> dict[str, Any]:
        rank = c.get_rank()
        found = {}
        c.isend(mine, (rank + 1) % count)
        found["computed"] = c.recv(mine, (rank - 1) % count)
        out, handle = c.irecv(mine, (rank + 1) % count, tag=7)  # asked for before it is sent
        c.send(mine * 2, (rank - 1) % count, tag=7)
        assert handle is not None
        assert handle.wait()
        assert handle.is_completed()
        found["asked before"] = out.value
        c.isend(mine, (rank + 1) % count)
        found["any"] = c.recv(mine)
        ahead = [(i + 1) % count for i in range(count)]
        back = [(i - 1) % count for i in range(count)]
        c.isend(mine, ahead)
        found["listed"] = c.recv(mine, back)
        c.isend(mine, ahead)
        found["listed once"] = c.recv(mine, (rank - 1) % count)
        # Only replica 0 sends, so the others keep theirs, but for replica 1.
        c.send(mine, [1, *[None] * (count - 1)])
        found["some"] = c.recv(mine, [None, 0, *[None] * (count - 2)])
        return found

    for i, found in enumerate(runs(executor, count, ring)):
        before, after = x[(i - 1) % count], x[(i + 1) % count]
        for name in ("computed", "any", "listed", "listed once"):
            np.testing.assert_array_equal(found[name], before, err_msg=name)
        np.testing.assert_array_equal(found["asked before"], 2 * after)
        np.testing.assert_array_equal(found["some"], x[0] if i == 1 else x[i])


def test_several_at_once_in_a_group(executor: str) -> None:
    x = given(4)

    def swap(mine: jax.Array) -> list[Any]:
        pairs = [c.Group("even", (0, 2)), c.Group("odd", (3, 1))]
        results = []
        for pair in pairs if executor == "compiled" else [pairs[int(c.get_rank()) % 2]]:
            other = (jnp.asarray(c.get_rank()) + 2) % 4
            handles = c.batch_isend_irecv(
                [c.P2POp("irecv", mine, other, pair), c.P2POp(c.isend, mine, other, pair)]
            )
            results.append(handles[0].result())
        if executor == "eager":
            return results
        return [jnp.where(c.get_rank() % 2 == 0, *results)]

    for i, found in enumerate(runs(executor, 4, swap)):
        np.testing.assert_array_equal(found[0], x[(i + 2) % 4])


def test_gradients_come_back(executor: str) -> None:
    count = 3
    rows = given(count)

    def loss(x: jax.Array) -> jax.Array:
        rank = c.get_rank()
        c.isend(x**2, (rank + 1) % count, tag=1)
        c.isend(x**3, (rank - 1) % count, tag=2)
        before = c.recv(x, (rank - 1) % count, tag=1)
        after = c.recv(x, (rank + 1) % count, tag=2)
        return jnp.sum((rank + 1) * before + 10.0 * (rank + 1) * after + x)

    found = runs(executor, count, jax.grad(loss))
    for i, gradient in enumerate(found):
        ahead, back = (i + 1) % count + 1, (i - 1) % count + 1
        wanted = 2 * ahead * rows[i] + 30.0 * back * rows[i] ** 2 + 1
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


def test_gradients_that_cannot_come_back_are_refused() -> None:
    def one_way(x: jax.Array) -> jax.Array:
        if c.get_rank() == 0:
            c.send(x, 1)
            return x.sum()
        return c.recv(x, 0).sum()

    with pytest.raises(px.errors.ContextError, match="sends before it receives"):
        runs("eager", 2, jax.grad(one_way))


def test_a_compiled_ring_inside_of_scan() -> None:
    x = given(3)

    def steps(mine: jax.Array) -> jax.Array:
        rank = c.get_rank()

        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            c.isend(carry, (rank + 1) % 3)
            return c.recv(carry, (rank - 1) % 3) + 1, None

        return jax.lax.scan(body, mine, None, length=4)[0]

    for i, found in enumerate(runs("compiled", 3, steps)):
        np.testing.assert_array_equal(found, x[(i - 4) % 3] + 4)


def test_branches_tags_sources_and_buffers_of_eager_replicas() -> None:
    def program(mine: jax.Array) -> Any:
        rank = int(c.get_rank())
        buffer = np.zeros(1, np.float64)
        if rank == 0:  # receives in another order than was sent, and before anyone has sent
            handle = c.irecv_(buffer, tag=9)
            second, first = (c.recv(np.zeros(1), 1, tag=t) for t in (2, 1))
            c.barrier()
            assert handle is not None
            return [first[0], second[0], c.recv_(np.zeros(1), 2), handle.source_rank(), buffer[0]]
        if rank == 1:
            c.send(np.ones(1), 0, tag=1)
            c.send(np.full(1, 2.0), 0, tag=2)
        else:
            work = c.isend(np.full(1, 1e-300), 0, tag=9)
            assert work is not None
            assert work.wait()
            c.send(np.zeros(1), 0)
        c.barrier()
        return [0.0, 0.0, 0, 0, 0.0]

    found = runs("eager", 3, program)[0]
    assert [float(x) for x in found[:4]] == [1.0, 2.0, 2.0, 2.0]
    assert found[4] == 1e-300


def test_mistakes_are_named() -> None:
    two = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(px.errors.MergeMismatchError, match=r"wait for each other.*a message"):
        two.run(lambda: c.recv(jnp.ones(2), 1 - c.get_rank()))
    with pytest.raises(px.errors.CollectiveMismatchError, match=r"receives float32\[3\].*float32\[2\]"):
        two.run(lambda: (c.send(jnp.ones(2), 1 - c.get_rank()), c.recv(jnp.ones(3), None)))
    with pytest.raises(ValueError, match="another rank than this replica"):
        two.run(lambda: c.send(jnp.ones(2), c.get_rank()))
    with pytest.raises(ValueError, match="one of the ranks"):
        two.run(lambda: c.send(jnp.ones(2), 2))
    with pytest.raises(TypeError, match="tag must be"):
        two.run(lambda: c.send(jnp.ones(2), 1, tag="a"))
    with pytest.raises(ValueError, match="another rank, each at most once"):
        two.run(lambda: c.send(jnp.ones(2), [1, 1]))
    compiled = px.function(two.run)
    with pytest.raises(ValueError, match="computed from px"):
        compiled(lambda: c.send(jnp.ones(2), 1))
    with pytest.raises(px.errors.MergeMismatchError, match="move that before the wait"):
        compiled(lambda: c.recv(jnp.ones(2), 1 - c.get_rank()))
    with pytest.raises(px.errors.CollectiveMismatchError, match="but send"):
        compiled(lambda: (c.send(jnp.ones(2), [1, 0]), c.recv(jnp.ones(3), [1, 0])))
    three = px.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    with pytest.raises(px.errors.CollectiveMismatchError, match="senders and receivers"):
        px.function(
            lambda: three.run(lambda: (c.send(1.0, [1, 2, 0]), c.recv(jnp.float32(1), [1, 2, 0])))
        )()
    with pytest.raises(ValueError, match="at least two"):
        px.OneDeviceStrategy("CPU:0").run(lambda: c.send(jnp.ones(2), 0))
