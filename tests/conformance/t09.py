"""Structures, central storage, saved state, and training.

Where TensorFlow's code compiles the step with ``tf.function``, the decorator is left out: a step that
runs eagerly must mean the same. Checkpoints become `Variable.state` and `Variable.load_state`, datasets
become batches made by hand, and Keras' optimizers and metrics become the small ones below, which do
with optax and Phalanx what Keras does under a strategy.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from tests.conformance.harness import awaits, case, comps, differs, dist, fresh, frid, mirrored, rc, rid

S = px.VariableSynchronization
A = px.VariableAggregation


def central() -> px.CentralStorageStrategy:
    return px.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")


# -- structures ----------------------------------------------------------------------------------


@case()
def rg_nested_structures():
    return mirrored(2).run(lambda: {"a": frid(), "b": (frid(), [frid()]), "n": None, "s": "x", "i": 3})


@case()
def rg_different_python_ints():
    return mirrored(2).run(lambda: int(rid()))


@case()
def rg_namedtuple():
    P = collections.namedtuple("P", "x y")
    r = mirrored(2).run(lambda: P(frid(), 1))
    return {"type": type(r).__name__, "x": r.x, "y": r.y}


@case()
def rg_ordered_dict():
    r = mirrored(2).run(lambda: collections.OrderedDict([("z", frid()), ("a", frid())]))
    return {"type": type(r).__name__, "keys": list(r)}


@case()
def rg_list_length_mismatch():
    return mirrored(2).run(lambda: [1] * (int(rid()) + 1))


@case()
def rg_dict_key_mismatch():
    return mirrored(2).run(lambda: {f"k{int(rid())}": 1})


@case()
def rg_type_mismatch():
    return mirrored(2).run(lambda: [1] if int(rid()) == 0 else (1,))


@case()
def rg_same_tensor_object():
    c = jnp.array(1.0)
    return mirrored(2).run(lambda: c) is c


@case()
def rg_compiled_python_int():
    s = mirrored(2)
    return s.run(lambda: 3)


@case()
def rg_local_results_nest():
    s = mirrored(2)
    return s.experimental_local_results({"a": s.run(lambda: fresh(frid())), "b": jnp.array(5.0)})


@case()
def rg_python_string_arg():
    return mirrored(2).run(lambda a, b: (a, b.shape[0]), args=("hi", np.zeros(3)))


@case()
def rg_per_replica_used_outside():
    s = mirrored(2)
    p = s.run(lambda: fresh(frid()))
    return jnp.add(p, 1.0)


@case()
def rg_per_replica_operator_outside():
    s = mirrored(2)
    p = s.run(lambda: fresh(frid()))
    return p + 1.0


@case()
def rg_per_replica_used_in_scope():
    s = mirrored(2)
    p = s.run(lambda: fresh(frid()))
    with s.scope():
        return jnp.add(p, 1.0)


@case()
def rg_values_attribute():
    s = mirrored(2)
    return s.run(lambda: fresh(frid())).values


# -- central storage -----------------------------------------------------------------------------


@differs()
def cst_basics():
    s = central()
    with s.scope():
        v = px.Variable(1.0)
    assert s.num_replicas_in_sync == 2
    assert [d[-5:] for d in s.extended.worker_devices] == ["CPU:0", "CPU:1"]
    assert type(v).__name__ == "AggregatingVariable"
    assert v.device[-5:] == "CPU:0"
    # Here are the differences: the whole name of the parameter device, and the name of the library.
    assert s.extended.parameter_devices == ("/job:localhost/replica:0/task:0/device:CPU:0",)
    assert str(v) == "<px.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>"


@case()
def cst_replica_assign_add_SUM():
    s = central()
    with s.scope():
        v = px.Variable(10.0, aggregation=A.SUM)
    s.run(lambda: v.assign_add(frid() + 1.0))
    return v.numpy()


@case()
def cst_pyconst_sum():
    s = central()
    with s.scope():
        v = px.Variable(10.0, aggregation=A.SUM)
    s.run(lambda: v.assign_add(1.0))
    return v.numpy()


@case()
def cst_default_devices():
    s = px.experimental.CentralStorageStrategy()
    with s.scope():
        v = px.Variable(1.0)
    return [s.num_replicas_in_sync, type(v).__name__, list(s.extended.parameter_devices)]


@case()
def cst_reduce_gather():
    s = central()
    p = s.run(lambda: fresh(frid() + 1.0))
    return {
        "run": p,
        "sum": s.reduce("SUM", p, axis=None),
        "mean": s.reduce("MEAN", p, axis=None),
        "gather": s.gather(s.run(lambda: jnp.reshape(frid(), [1])), axis=0),
        "ar": s.run(lambda: rc().all_reduce("SUM", frid() + 1.0)),
    }


# -- saved state ---------------------------------------------------------------------------------


@case()
def ck_plain_to_mirrored():
    v = px.Variable(5.0)
    state = v.state()
    s = mirrored(2)
    with s.scope():
        w = px.Variable(0.0)
    w.load_state(state)
    return comps(w)


@case()
def ck_on_read_sum():
    s = mirrored(2)
    with s.scope():
        v = px.Variable(0.0, synchronization=S.ON_READ, aggregation=A.SUM)
    s.run(lambda: v.assign(frid() + 1.0))
    state = v.state()
    v.load_state(state)
    two = comps(v)
    t = mirrored(3)
    with t.scope():
        w = px.Variable(0.0, synchronization=S.ON_READ, aggregation=A.SUM)
    w.load_state(state)
    plain = px.Variable(0.0)
    plain.load_state(state)
    return {"two": two, "three": comps(w), "plain": plain.numpy()}


@differs()
def ck_diverged_mirrored():
    s = mirrored(2)
    with s.scope():
        v = px.Variable(0.0)
    with pytest.raises(px.errors.DivergenceError):
        s.run(lambda: v.assign(frid() + 1.0))
    assert comps(v) == [0.0, 0.0]
    v.load_state(jnp.array(1.0))
    assert comps(v) == [1.0, 1.0]


# -- training ------------------------------------------------------------------------------------


class Optimizer:
    """What a Keras optimizer does under a strategy, with the arithmetic of optax.

    Gradients are summed over replicas; then each variable is updated once, on the devices of its
    copies. Slots, such as momenta, are variables that live with the variable they belong to.
    """

    def __init__(self, transform: optax.GradientTransformation) -> None:
        self._transform = transform
        self._slots: dict[Any, tuple[list[px.Variable], Any]] = {}
        self.iterations = px.Variable(0, trainable=False, aggregation=A.ONLY_FIRST_REPLICA)

    def apply_gradients(self, gradients_and_variables: Sequence[tuple[Any, px.Variable]]) -> None:
        """Take one step; called on every replica with its own gradients."""
        used = [(g, v) for g, v in gradients_and_variables if g is not None]
        gradients = rc().all_reduce(px.ReduceOp.SUM, [g for g, _ in used])
        rc().merge_call(self._update, args=(gradients, [v for _, v in used]))
        self.iterations.assign_add(1)

    def _update(self, strategy: px.Strategy, gradients: list[Any], variables: list[Any]) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            slots, structure = self._slots_of(strategy, variable)

            def step(copy: px.Variable, gradient: Any, slots=slots, structure=structure) -> None:
                state = jax.tree.unflatten(structure, [slot.read_value() for slot in slots])
                value = copy.read_value()
                delta, state = self._transform.update(dense(gradient, copy), state, value)
                copy.assign(optax.apply_updates(value, delta))
                for slot, new in zip(slots, jax.tree.leaves(state), strict=True):
                    slot.assign(new)

            strategy.extended.update(variable, step, args=(gradient,))

    def _slots_of(self, strategy: px.Strategy, variable: px.Variable) -> tuple[list[px.Variable], Any]:
        key = variable.ref()
        if key not in self._slots:
            leaves, structure = jax.tree.flatten(self._transform.init(variable.read_value()))
            with strategy.extended.colocate_vars_with(variable):
                slots = [px.Variable(leaf, trainable=False) for leaf in leaves]
            self._slots[key] = slots, structure
        return self._slots[key]


def dense(gradient: Any, variable: px.Variable) -> jax.Array:
    """A gradient as an array of the variable's shape."""
    if isinstance(gradient, px.IndexedSlices):
        zeros = jnp.zeros(variable.shape, variable.dtype)
        return zeros.at[gradient.indices].add(gradient.values)
    return gradient


class Mean:
    """The Mean metric of Keras: a total and a count, both summed over replicas when read."""

    def __init__(self) -> None:
        self._total, self._count = (
            px.Variable(0.0, synchronization=S.ON_READ, aggregation=A.SUM) for _ in range(2)
        )

    def update_state(self, values: jax.Array) -> None:
        self._total.assign_add(jnp.sum(values))
        self._count.assign_add(jnp.float32(values.size))

    def result(self) -> jax.Array:
        count = self._count.read_value()
        return jnp.where(count == 0, 0.0, self._total.read_value() / jnp.maximum(count, 1.0))

    def reset_state(self) -> None:
        self._total.assign(0.0)
        self._count.assign(0.0)


SGD = optax.sgd(0.02)
MOMENTUM = optax.sgd(0.02, momentum=0.9)
ADAM = optax.adam(0.1, eps=1e-7)

STRATEGIES: dict[str, Callable[[], px.Strategy]] = {
    "one": lambda: px.OneDeviceStrategy("CPU:0"),
    "two": lambda: mirrored(2),
    "central2": central,
}


def train(
    strategy: str,
    transform: optax.GradientTransformation,
    *,
    examples: Sequence[float] = (1.0, 2.0, 3.0, 4.0) * 3,
    batch: int = 4,
    local_mean: bool = False,
) -> dict[str, list[float]]:
    """Fit y = w * x + b to y = 2 * x + 1, and give the losses and every copy of w and b."""
    s = STRATEGIES[strategy]()
    with s.scope():
        w, b = px.Variable(0.0), px.Variable(0.0)
        optimizer = Optimizer(transform)

    def step(x: jax.Array) -> jax.Array:
        def loss(w: jax.Array, b: jax.Array) -> jax.Array:
            errors = (w * x + b - (2.0 * x + 1.0)) ** 2
            return jnp.mean(errors) if local_mean else jnp.sum(errors) / batch

        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(w.read_value(), b.read_value())
        optimizer.apply_gradients(zip(gradients, (w, b), strict=True))
        return value

    losses = []
    for start in range(0, len(examples), batch):
        part = np.asarray(examples[start : start + batch], np.float32)
        parts = [jnp.asarray(p) for p in np.array_split(part, s.num_replicas_in_sync)]
        per_replica = s.run(step, args=(dist(s, parts),))
        losses.append(float(s.reduce("SUM", per_replica, axis=None)))
    return {
        "w": [float(x) for x in comps(w)],
        "b": [float(x) for x in comps(b)],
        "losses": losses,
    }


@case()
def tr_sgd_one():
    return train("one", SGD)


@case()
def tr_sgd_two():
    return train("two", SGD)


@case()
def tr_momentum_central2():
    return train("central2", MOMENTUM)


@case()
def tr_adam_one():
    return train("one", ADAM)


@case()
def tr_sgd_local_mean_one():
    return train("one", SGD, local_mean=True)


@case()
def tr_sgd_local_mean_two():
    return train("two", SGD, local_mean=True)


@case()
def tr_sgd_uneven_batch3_two():
    return train("two", SGD, batch=3)


@case()
def tr_apply_gradients_sum_semantics():
    s = mirrored(2)
    with s.scope():
        w = px.Variable(10.0)
        o = Optimizer(optax.sgd(1.0))

    s.run(lambda: o.apply_gradients([(frid() + 1.0, w)]))
    return comps(w)


@case()
def tr_optimizer_created_outside_scope():
    s = mirrored(2)
    o = Optimizer(optax.sgd(1.0))
    with s.scope():
        w = px.Variable(10.0)
    s.run(lambda: o.apply_gradients([(frid() + 1.0, w)]))
    return comps(w)


@case()
def tr_iterations_counter():
    s = mirrored(2)
    with s.scope():
        w = px.Variable(10.0)
        o = Optimizer(optax.sgd(0.1))
    for _ in range(3):
        s.run(lambda: o.apply_gradients([(frid() + 1.0, w)]))
    return int(o.iterations.numpy())


@case()
def tr_metric_mean():
    s = mirrored(2)
    with s.scope():
        m = Mean()
    s.run(lambda: m.update_state(frid() + 1.0))
    a = float(m.result())
    m.reset_state()
    return [a, float(m.result())]


@case()
def tr_sync_batchnorm():
    s = mirrored(2)
    x = dist(s, [jnp.array([[1.0], [3.0]]), jnp.array([[5.0], [7.0]])])

    def normalize(x):
        moments = [jnp.sum(x, axis=0), jnp.sum(x**2, axis=0), jnp.float32(x.shape[0])]
        total, squares, count = rc().all_reduce(px.ReduceOp.SUM, moments)
        mean = total / count
        return (x - mean) / jnp.sqrt(squares / count - mean**2)

    return s.run(normalize, args=(x,))


@case()
def tr_grad_none():
    s = mirrored(2)
    with s.scope():
        w = px.Variable(10.0)
        u = px.Variable(5.0)
        o = Optimizer(optax.sgd(1.0))
    s.run(lambda: o.apply_gradients([(frid() + 1.0, w), (None, u)]))
    return [comps(w), comps(u)]


@case()
def tr_eager_run_training():
    s = mirrored(2)
    with s.scope():
        w = px.Variable(10.0)
        o = Optimizer(optax.sgd(1.0))
    s.run(lambda: o.apply_gradients([(frid() + 1.0, w)]))
    return comps(w)


@case()
def tr_embedding_sparse_grads():
    s = mirrored(2)
    with s.scope():
        e = px.Variable([[0.0], [0.0], [0.0]])
        o = Optimizer(optax.sgd(1.0))
    ids = dist(s, [jnp.array([0]), jnp.array([2, 2])])

    def step(i):
        rows = jax.grad(jnp.sum)(e.read_value()[i])
        o.apply_gradients([(px.IndexedSlices(rows, i, e.shape), e)])

    s.run(step, args=(ids,))
    return comps(e)


awaits("the Keras integration", "tr_keras_fit_batch4_two")


@case()
def tr_compute_average_loss_scope():
    with mirrored(2).scope():
        return px.nn.compute_average_loss(jnp.array([1.0, 2.0]))


@case()
def tr_scale_regularization_loss():
    s = mirrored(2)
    try:
        with s.scope():
            in_scope = px.nn.scale_regularization_loss(jnp.asarray(6.0))
    except RuntimeError:
        in_scope = {"raises": "RuntimeError"}
    return {
        "none": px.nn.scale_regularization_loss(jnp.asarray(6.0)),
        "run": s.run(lambda: px.nn.scale_regularization_loss(jnp.asarray(6.0))),
        "scope": in_scope,
    }
