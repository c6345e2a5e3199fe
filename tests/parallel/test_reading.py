"""Programs as cost graphs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.parallel.gpt import arguments, array, loss_of

from phalanx.parallel.graph import Graph, GraphNode
from phalanx.parallel.reading import read
from phalanx.parallel.tracing import trace


def graph_of(function: Any, *args: Any, training: bool = True) -> Graph:
    traced = trace(function, args, 0)
    return read(traced.closed, traced.names, traced.results, traced.parameters, training)


def node(graph: Graph, key: str) -> GraphNode:
    (found,) = [n for n in graph.nodes if n.key == key]
    return found


def into(graph: Graph, key: str) -> list[tuple[str, float, float]]:
    """What a node reads, and how often its layout and that of its gradient may change."""
    number = [n.key for n in graph.nodes].index(key)
    return [
        (graph.nodes[e.source].key, e.forward, e.backward) for e in graph.edges if e.target == number
    ]


def test_names_and_kinds() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return {"loss": jnp.sum(batch["x"] @ params["layer"]["kernel"]), "extra": batch["x"][0]}

    graph = graph_of(loss, {"layer": {"kernel": array(4, 8)}}, {"x": array(2, 4)})
    kinds = {n.key: n.kind for n in graph.nodes}
    assert kinds["layer/kernel"] == "parameter"
    assert kinds["batch/x"] == "input"
    assert kinds["output/loss"] == kinds["output/extra"] == "output"
    assert kinds["batch/x:copy"] == "copy"  # it is read twice
    assert graph.notes == ()


def test_gradients_flow_from_parameters_only() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(jnp.cos(x) @ w))

    graph = graph_of(loss, array(4, 8), array(2, 4))
    assert into(graph, "cos") == [("x", 1.0, 0.0)]
    assert into(graph, "dot_general") == [("cos", 1.0, 0.0), ("w", 1.0, 1.0)]
    assert node(graph, "dot_general").gradients == 1
    assert not node(graph, "cos").active
    # The gradient of the product needs what w is multiplied with, and that of tanh its own result.
    assert node(graph, "dot_general").kept_operands == (0,)
    assert node(graph, "tanh").kept == (0,)
    still = graph_of(loss, array(4, 8), array(2, 4), training=False)
    assert not any(n.active or n.kept or n.kept_operands for n in still.nodes)
    assert not any(e.backward for e in still.edges)


def test_gradients_stop() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.stop_gradient(x @ w) * (x @ w))

    graph = graph_of(loss, array(4, 8), array(2, 4))
    assert [e[2] for e in into(graph, "mul")] == [0.0, 1.0]
    assert [e[2] for e in into(graph, "dot_general")] == [0.0, 0.0]  # its gradient stops later on
    assert [e[2] for e in into(graph, "dot_general_1")] == [0.0, 1.0]


def test_scan_bodies_are_read_once_with_their_rounds() -> None:
    def loss(params: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w) @ params["same"], h.sum()

        h, sums = jax.lax.scan(layer, x, params["stack"])
        return h.sum() + sums.sum()

    graph = graph_of(loss, {"stack": array(5, 8, 8), "same": array(8, 8)}, array(4, 8))
    assert node(graph, "scan/dot_general").times == 5
    # The rows of the stack are cut along any dim but the first.
    row = node(graph, "scan/unstack").operator
    assert row.operands == ((-1, 0, 1),)
    assert row.results == ((0, 1),)
    assert into(graph, "scan/unstack") == [("stack", 1.0, 1.0)]
    # What is carried comes from outside once, and from the end of each round.
    assert into(graph, "scan/carry") == [("x", 1.0, 0.0), ("scan/dot_general_1", 5.0, 5.0)]
    # A parameter from outside is brought into place once; its gradient is summed in each round.
    assert into(graph, "scan/dot_general_1") == [("scan/tanh", 5.0, 5.0), ("same", 1.0, 5.0)]
    assert node(graph, "scan/carry").kept == (0,)


def test_what_is_computed_again_is_not_kept() -> None:
    def loss(again: bool) -> Any:
        def layer(w: Any, x: Any) -> Any:
            return jnp.sin(jnp.tanh(x @ w) @ w)

        def run(w: Any, x: Any) -> Any:
            h = jnp.exp(x @ w)
            return jnp.sum((jax.checkpoint(layer) if again else layer)(w, h))

        return run

    once, twice = (graph_of(loss(flag), array(8, 8), array(4, 8)) for flag in (False, True))
    assert node(once, "tanh").kept == (0,)
    assert node(twice, "tanh").kept == ()
    assert node(twice, "tanh").again
    assert not node(twice, "exp").again
    assert into(twice, "tanh")[0][1] == 2.0  # forward twice
    assert node(twice, "exp").kept == (0,)
    assert all(not n.kept_operands for n in twice.nodes if n.again and n.key != "dot_general_1")


def test_branches_share_their_cost_and_join() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda a: a @ w, jnp.sin, x).sum()

    graph = graph_of(loss, array(8, 8), array(4, 8))
    assert node(graph, "cond/branch1/dot_general").times == 0.5
    assert [e[0] for e in into(graph, "cond/join")] == ["cond/branch0/sin", "cond/branch1/dot_general"]
    assert into(graph, "reduce_sum")[0] == ("cond/join", 1.0, 1.0)


def test_loops_without_a_known_number_of_rounds() -> None:
    def run(w: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0].sum() < 1e3, lambda c: (c[0] @ w, c[1] + 1), (x, 0))

    graph = graph_of(run, array(8, 8), array(4, 8), training=False)
    assert [e[0] for e in into(graph, "while/carry")] == ["x", "while/dot_general"]
    assert graph.notes == ("while runs an unknown number of rounds; its cost is that of one.",)


def test_calls_are_taken_apart() -> None:
    @jax.custom_vjp
    def square(x: Any) -> Any:
        return x * x

    square.defvjp(lambda x: (square(x), x), lambda x, g: (2 * x * g,))

    def loss(w: Any, x: Any) -> Any:
        with jax.named_scope("layer"):
            return jax.jit(lambda a: jax.nn.relu(square(a @ w)))(x).sum()

    keys = [n.key for n in graph_of(loss, array(8, 8), array(4, 8)).nodes]
    assert "layer/<lambda>/dot_general" in keys
    assert "layer/<lambda>/mul" in keys
    assert "layer/<lambda>/relu/max" in keys


def test_barriers_are_not_there() -> None:
    def loss(w: Any, x: Any) -> Any:
        a, b = jax.lax.optimization_barrier((w, x))
        return (b @ a).sum()

    graph = graph_of(loss, array(8, 8), array(4, 8))
    assert into(graph, "dot_general") == [("x", 1.0, 0.0), ("w", 1.0, 1.0)]
    assert graph.notes == ()


def test_opaque_operators_and_effects_are_told() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = jax.pure_callback(np.sin, array(4, 8), x @ w)
        jax.debug.callback(lambda a: None, h)
        return h.sum()

    notes = graph_of(loss, array(8, 8), array(4, 8)).notes
    assert len(notes) == 2
    assert notes[0].startswith("pure_callback is opaque")
    assert notes[1].endswith("It has effects.")


def test_fingerprints_are_those_of_the_program() -> None:
    sizes = {"blocks": 1, "batch": 8}
    first, again = (graph_of(loss_of(4), *arguments(**sizes)).fingerprint() for _ in range(2))
    assert first == again
    assert graph_of(loss_of(8), *arguments(**sizes)).fingerprint() != first
    assert graph_of(loss_of(4), *arguments(**{**sizes, "batch": 16})).fingerprint() != first


def test_constants_are_counted() -> None:
    table = np.ones((100, 10), np.float32)
    assert graph_of(lambda w: (w @ jnp.asarray(table)).sum(), array(4, 100)).constants == 4000
