"""Structures, central storage, saved state, and training.

Checkpoints become `Variable.state` and `Variable.load_state`, datasets become batches made by hand, and
Keras' optimizers and metrics become those of `px.train`.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from tests.conformance.harness import (
    case,
    cases,
    comps,
    differs,
    dist,
    fresh,
    frid,
    mirrored,
    rc,
    rid,
)

S = px.VariableSynchronization
A = px.VariableAggregation


def central() -> px.CentralStorageStrategy:
    return px.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")


# -- structures ----------------------------------------------------------------------------------


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
def rg_same_tensor_object():
    c = jnp.array(1.0)
    return mirrored(2).run(lambda: c) is c


@case()
def rg_compiled_python_int():
    s = mirrored(2)

    @px.function
    def f():
        return 3

    return s.run(f)


@case()
def rg_local_results_nest():
    s = mirrored(2)
    return s.experimental_local_results({"a": s.run(lambda: fresh(frid())), "b": jnp.array(5.0)})


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


SGD = optax.sgd(0.02)
MOMENTUM = optax.sgd(0.02, momentum=0.9)
ADAM = optax.adam(0.1, eps=1e-7)

STRATEGIES: dict[str, Callable[[], px.Strategy]] = {
    "one": lambda: px.OneDeviceStrategy("CPU:0"),
    "two": lambda: mirrored(2),
    "central2": central,
}


def train(
    strategy: str, transform: optax.GradientTransformation, **kwargs: Any
) -> dict[str, list[float]]:
    """Fit y = w * x + b to y = 2 * x + 1, and give the losses and every copy of w and b.

    The records do not say whether the steps were compiled, so both executors must agree.
    """
    eager, compiled = (fit(strategy, transform, compiled=c, **kwargs) for c in (False, True))
    for name, numbers in eager.items():
        np.testing.assert_allclose(compiled[name], numbers, rtol=2e-5, atol=1e-6)
    return compiled


def fit(
    strategy: str,
    transform: optax.GradientTransformation,
    *,
    compiled: bool,
    batch: int = 4,
    local_mean: bool = False,
) -> dict[str, list[float]]:
    """Train with one executor."""
    s = STRATEGIES[strategy]()
    examples = (1.0, 2.0, 3.0, 4.0) * 3
    with s.scope():
        w, b = px.Variable(0.0), px.Variable(0.0)
        optimizer = px.train.Optimizer(transform)

    def step(x: jax.Array) -> jax.Array:
        def loss(w: jax.Array, b: jax.Array) -> jax.Array:
            errors = (w * x + b - (2.0 * x + 1.0)) ** 2
            return jnp.mean(errors) if local_mean else jnp.sum(errors) / batch

        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(w.read_value(), b.read_value())
        optimizer.apply_gradients(zip(gradients, (w, b), strict=True))
        return value

    def total(x: Any) -> jax.Array:
        return s.reduce("SUM", s.run(step, args=(x,)), axis=None)

    train_step = px.function(total) if compiled else total
    losses = []
    for start in range(0, len(examples), batch):
        part = np.asarray(examples[start : start + batch], np.float32)
        parts = [jnp.asarray(p) for p in np.array_split(part, s.num_replicas_in_sync)]
        losses.append(float(train_step(dist(s, parts))))
    return {
        "w": [float(x) for x in comps(w)],
        "b": [float(x) for x in comps(b)],
        "losses": losses,
    }


@case()
def tr_apply_gradients_sum_semantics():
    s = mirrored(2)
    with s.scope():
        w = px.Variable(10.0)
        o = px.train.Optimizer(optax.sgd(1.0))

    @px.function
    def f():
        s.run(lambda: o.apply_gradients([(frid() + 1.0, w)]))

    f()
    return comps(w)


@case()
def tr_optimizer_created_outside_scope():
    s = mirrored(2)
    o = px.train.Optimizer(optax.sgd(1.0))
    with s.scope():
        w = px.Variable(10.0)

    @px.function
    def f():
        s.run(lambda: o.apply_gradients([(frid() + 1.0, w)]))

    f()
    return comps(w)


@case()
def tr_iterations_counter():
    s = mirrored(2)
    with s.scope():
        w = px.Variable(10.0)
        o = px.train.Optimizer(optax.sgd(0.1))

    @px.function
    def f():
        s.run(lambda: o.apply_gradients([(frid() + 1.0, w)]))

    for _ in range(3):
        f()
    return int(o.iterations.numpy())


@case()
def tr_metric_mean():
    s = mirrored(2)
    with s.scope():
        m = px.train.Mean()
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

    @px.function
    def f(x):
        return s.run(normalize, args=(x,))

    return f(x)


@case()
def tr_grad_none():
    s = mirrored(2)
    with s.scope():
        w = px.Variable(10.0)
        u = px.Variable(5.0)
        o = px.train.Optimizer(optax.sgd(1.0))

    @px.function
    def f():
        s.run(lambda: o.apply_gradients([(frid() + 1.0, w), (None, u)]))

    f()
    return [comps(w), comps(u)]


@case()
def tr_eager_run_training():
    s = mirrored(2)
    with s.scope():
        w = px.Variable(10.0)
        o = px.train.Optimizer(optax.sgd(1.0))
    s.run(lambda: o.apply_gradients([(frid() + 1.0, w)]))
    return comps(w)


@case()
def tr_embedding_sparse_grads():
    s = mirrored(2)
    with s.scope():
        e = px.Variable([[0.0], [0.0], [0.0]])
        o = px.train.Optimizer(optax.sgd(1.0))
    ids = dist(s, [jnp.array([0]), jnp.array([2, 2])])

    def g(i):
        rows = jax.grad(jnp.sum)(e.read_value()[i])
        o.apply_gradients([(px.IndexedSlices(rows, i, e.shape), e)])

    @px.function
    def f(ids):
        s.run(g, args=(ids,))

    f(ids)
    return comps(e)


@case()
def tr_keras_fit_batch4_two():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    with mirrored(2).scope():
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile(keras.optimizers.SGD(0.02), "mse")
    x = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
    model.fit(x, 2 * x + 1, batch_size=4, epochs=1, verbose=0)
    return [float(w.squeeze()) for w in model.get_weights()]


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


# -- one expression each ---------------------------------------------------------------------------

cases(
    {
        "rg_nested_structures": lambda: mirrored(2).run(
            lambda: {"a": frid(), "b": (frid(), [frid()]), "n": None, "s": "x", "i": 3}
        ),
        "rg_different_python_ints": lambda: mirrored(2).run(lambda: int(rid())),
        "rg_list_length_mismatch": lambda: mirrored(2).run(lambda: [1] * (int(rid()) + 1)),
        "rg_dict_key_mismatch": lambda: mirrored(2).run(lambda: {f"k{int(rid())}": 1}),
        "rg_type_mismatch": lambda: mirrored(2).run(lambda: [1] if int(rid()) == 0 else (1,)),
        "rg_python_string_arg": lambda: mirrored(2).run(
            lambda a, b: (a, b.shape[0]), args=("hi", np.zeros(3))
        ),
        "tr_sgd_one": lambda: train("one", SGD),
        "tr_sgd_two": lambda: train("two", SGD),
        "tr_momentum_central2": lambda: train("central2", MOMENTUM),
        "tr_adam_one": lambda: train("one", ADAM),
        "tr_sgd_local_mean_one": lambda: train("one", SGD, local_mean=True),
        "tr_sgd_local_mean_two": lambda: train("two", SGD, local_mean=True),
        "tr_sgd_uneven_batch3_two": lambda: train("two", SGD, batch=3),
    }
)
