"""Communication: reduce, gather, collectives, merge_call, update, CrossDeviceOps and their options."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from tests.conformance.harness import (
    V,
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


def central() -> px.CentralStorageStrategy:
    return px.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")


def class_name(x: Any) -> str:
    """The class of a value, with JAX's arrays called by the name of TensorFlow's."""
    return "EagerTensor" if isinstance(x, jax.Array) else type(x).__name__


def floats(value: px.DistributedValues) -> list[float]:
    assert isinstance(value, px.DistributedValues)
    return [float(x) for x in value.values]


# -- reduce --------------------------------------------------------------------------------------


@case()
def red_string_op_any_case():
    s = mirrored(2)
    v = dist(s, V(1.0, 2.0))
    return [s.reduce(op, v, axis=None) for op in ("sum", "SUM", "Mean")]


@case()
def red_bad_string_op():
    s = mirrored(2)
    return s.reduce("MAX", dist(s, V(1.0, 2.0)), axis=None)


@case()
def red_mean_axis_none_int():
    s = mirrored(2)
    return s.reduce("MEAN", dist(s, V(1, 2)), axis=None)


@case()
def red_sum_axis_negative():
    s = mirrored(2)
    return s.reduce("SUM", dist(s, V([[1.0, 2.0]], [[3.0, 4.0]])), axis=-1)


@case()
def red_mean_axis_negative():
    s = mirrored(2)
    v = dist(s, V([[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]))
    return s.reduce("MEAN", v, axis=-1)


@case()
def red_mean_axis_out_of_range():
    s = mirrored(2)
    return s.reduce("MEAN", dist(s, V([1.0], [2.0])), axis=1)


@case()
def red_mean_axis_out_of_range_negative():
    s = mirrored(2)
    return s.reduce("MEAN", dist(s, V([1.0], [2.0])), axis=-2)


@case()
def red_mean_axis_string():
    s = mirrored(2)
    return s.reduce("MEAN", dist(s, V([1.0], [2.0])), axis="0")


@case()
def red_mean_all_empty():
    s = mirrored(2)
    return s.reduce("MEAN", dist(s, [jnp.zeros([0]), jnp.zeros([0])]), axis=0)


@case()
def red_sum_empty_replica():
    s = mirrored(2)
    return s.reduce("SUM", dist(s, [jnp.array([1.0, 2.0]), jnp.zeros([0])]), axis=0)


@case()
def red_mean_rank2_partial():
    s = mirrored(2)
    return s.reduce("MEAN", dist(s, V([[1.0, 10.0], [3.0, 30.0]], [[5.0, 50.0]])), axis=0)


@case()
def red_plain_tensor_sum():
    s = mirrored(2)
    return s.reduce("SUM", jnp.array(1.0), axis=None)


@differs()
def red_plain_python_zero_sum():
    s = mirrored(2)
    assert int(s.reduce("SUM", 0, axis=None)) == 0


@case()
def red_plain_tensor_sum_axis0():
    s = mirrored(2)
    return s.reduce("SUM", jnp.array([1.0, 2.0]), axis=0)


@case()
def red_mirrored_variable_sum():
    s = mirrored(2)
    with s.scope():
        v = px.Variable(3.0)
    return s.reduce("SUM", v, axis=None)


@case()
def red_mirrored_variable_mean():
    s = mirrored(2)
    with s.scope():
        v = px.Variable(3.0)
    return s.reduce("MEAN", v, axis=None)


@case()
def red_nested_value():
    s = mirrored(2)
    value = {"a": dist(s, V(1.0, 2.0)), "b": [dist(s, V(3.0, 4.0))]}
    return s.reduce("SUM", value, axis=None)


@differs()
def red_per_replica_python_numbers():
    s = mirrored(2)
    total = s.reduce("SUM", dist(s, [1, 2]), axis=None)
    assert total.dtype == jnp.int32
    assert int(total) == 3


@case()
def red_per_replica_numpy_values():
    s = mirrored(2)
    return s.reduce("SUM", dist(s, [np.float32(1), np.float32(2)]), axis=None)


@case()
def red_indexed_slices_mean():
    s = mirrored(2)
    r = s.run(
        lambda: px.IndexedSlices(
            values=jnp.reshape(frid() + 1.0, [1]),
            indices=jnp.array([0]),
            dense_shape=jnp.array([2]),
        )
    )
    return s.reduce("MEAN", r, axis=None)


@case()
def red_in_compiled_function():
    s = mirrored(2)

    @px.function
    def f(v):
        return s.reduce("MEAN", v, axis=0)

    return f(dist(s, V([1.0, 2.0, 3.0], [10.0])))


@case()
def red_one_device_sum():
    s = px.OneDeviceStrategy("CPU:0")
    t = jnp.array([1.0, 2.0])
    return [s.reduce("SUM", t, axis=None), s.reduce("SUM", t, axis=0), s.reduce("MEAN", t, axis=0)]


@case()
def red_mean_float_and_single_device_sum():
    a = mirrored(2)
    b = mirrored(1)
    return [
        a.reduce("MEAN", dist(a, V(2.0, 4.0)), axis=None),
        b.reduce("SUM", b.run(lambda: fresh(2.0)), axis=None),
    ]


@differs()
def run_tape_outside_compiled():
    s = mirrored(2)
    x = dist(s, V(1.0, 2.0))

    @px.function
    def f(w, x):
        def y(w):
            return s.reduce("SUM", s.run(lambda x: w * x, args=(x,)), axis=None)

        return jax.grad(y)(w)

    assert float(f(jnp.array(5.0), x)) == 3.0  # the sum of x


# -- gather and all_gather -----------------------------------------------------------------------


@case()
def gat_rank_mismatch():
    s = mirrored(2)
    return s.gather(dist(s, V([1.0], [[3.0]])), axis=0)


@case()
def gat_scalar():
    s = mirrored(2)
    return s.gather(dist(s, V(1.0, 2.0)), axis=0)


@case()
def gat_axis_out_of_range_int32():
    s = mirrored(2)
    return s.gather(dist(s, V([1], [2])), axis=2)


@differs()
def gat_axis_negative():
    s = mirrored(2)
    joined = s.gather(dist(s, V([[1.0]], [[2.0]])), axis=-1)
    assert joined.tolist() == [[1.0, 2.0]]


@case()
def gat_axis_negative_int32():
    s = mirrored(2)
    return s.gather(dist(s, V([[1]], [[2]])), axis=-1)


@case()
def gat_indexed_slices():
    s = mirrored(2)
    return s.gather(px.IndexedSlices(values=jnp.array([1.0]), indices=jnp.array([0])), axis=0)


@case()
def gat_empty_replica():
    s = mirrored(2)
    return s.gather(dist(s, [jnp.array([1.0, 2.0]), jnp.zeros([0])]), axis=0)


@case()
def agat_uneven():
    s = mirrored(2)
    v = dist(s, V([0.0], [2.0, 3.0]))

    @px.function
    def f(x):
        return rc().all_gather(x, axis=0)

    return s.run(f, args=(v,))


@case()
def agat_scalar():
    s = mirrored(2)
    return s.run(lambda: rc().all_gather(fresh(frid()), axis=0))


@case()
def agat_gradient():
    s = mirrored(2)
    x = dist(s, V([1.0], [1.0]))
    w = dist(s, V([1.0, 2.0], [10.0, 20.0]))

    @px.function
    def f(x, w):
        return jax.grad(lambda x: jnp.sum(w * rc().all_gather(x, axis=0)))(x)

    return s.run(f, args=(x, w))


# -- all_reduce ----------------------------------------------------------------------------------


@case()
def ar_nest():
    s = mirrored(2)
    return s.run(lambda: rc().all_reduce("SUM", {"a": frid() + 1.0, "b": (fresh(1.0), [fresh(2.0)])}))


@case()
def ar_int_sum():
    s = mirrored(2)
    return s.run(lambda: rc().all_reduce("SUM", rid() + 1))


@case()
def ar_int_mean():
    s = mirrored(2)
    return s.run(lambda: rc().all_reduce("MEAN", rid() + 1))


@case()
def ar_bad_op():
    s = mirrored(2)
    return s.run(lambda: rc().all_reduce("MAX", frid()))


@case()
def ar_shape_mismatch():
    s = mirrored(2)
    v = dist(s, V([1.0], [2.0, 3.0]))
    return s.run(lambda x: rc().all_reduce("SUM", x), args=(v,))


@case()
def ar_indexed_slices():
    s = mirrored(2)

    def f():
        slices = px.IndexedSlices(
            values=jnp.reshape(frid() + 1.0, [1]),
            indices=jnp.reshape(rid(), [1]),
            dense_shape=jnp.array([2]),
        )
        r = rc().all_reduce("SUM", slices)
        return r.values, r.indices

    return s.run(f)


@case()
def ar_options():
    s = mirrored(2)
    o = px.experimental.CommunicationOptions(bytes_per_pack=1)
    return s.run(lambda: rc().all_reduce("SUM", [frid(), frid() + 1.0], options=o))


@differs()
def ar_inside_cond_compiled():
    s = mirrored(2)

    @px.function
    def f(x):
        return jax.lax.cond(x > 0.0, lambda x: rc().all_reduce("SUM", x), lambda x: x, x)

    assert floats(s.run(f, args=(jnp.array(1.0),))) == [2.0, 2.0]
    assert floats(s.run(f, args=(jnp.array(-1.0),))) == [-1.0, -1.0]


@differs()
def ar_in_nested_compiled_function():
    s = mirrored(2)

    @px.function
    def g(x):
        return rc().all_reduce("SUM", x)

    result = s.run(lambda: g(fresh(1.0)))
    assert [float(x) for x in result.values] == [2.0, 2.0]


@case()
def ar_cross_replica_context():
    s = mirrored(2)
    with s.scope():
        return px.get_replica_context().all_reduce("SUM", 1.0)


@differs()
def ar_mixed_int_float_list():
    s = mirrored(2)
    real, whole = s.run(lambda: rc().all_reduce("SUM", [frid(), rid()]))
    assert [x.dtype for x in real.values] == [jnp.float32] * 2
    assert [x.dtype for x in whole.values] == [jnp.int32] * 2
    assert floats(real) == floats(whole) == [1.0, 1.0]


@differs()
def ar_same_tensor_compiled():
    s = mirrored(2)
    c = jnp.array(1.0)

    @px.function
    def f():
        return rc().all_reduce("SUM", c)

    assert floats(s.run(f)) == [2.0, 2.0]


@differs()
def ar_run_arg_plain_tensor():
    s = mirrored(2)
    r = s.run(lambda x: rc().all_reduce("SUM", x), args=(jnp.array(1.0),))
    assert floats(r) == [2.0, 2.0]


@differs()
def ar_none_value():
    s = mirrored(2)
    r = s.run(lambda: rc().all_reduce("SUM", {"a": frid(), "b": None}))
    assert set(r) == {"a", "b"}
    assert floats(r["a"]) == [1.0, 1.0]
    assert r["b"] is None


@differs()
def ar_empty_list():
    s = mirrored(2)
    assert s.run(lambda: rc().all_reduce("SUM", [])) == []


@differs()
def ar_different_order():
    s = mirrored(2)

    def f():
        a, b = fresh(1.0), fresh(10.0)
        if int(rid()) == 0:
            x = rc().all_reduce("SUM", a)
            y = rc().all_reduce("SUM", b)
        else:
            y = rc().all_reduce("SUM", b)
            x = rc().all_reduce("SUM", a)
        return x, y

    with pytest.raises(px.errors.MergeMismatchError) as caught:
        s.run(f)
    first = f.__code__.co_firstlineno
    for line in (first + 3, first + 6):  # where replica 0 and replica 1 were
        assert f"{__file__}:{line} in f" in str(caught.value)


# -- merge_call ----------------------------------------------------------------------------------


@case()
def mc_args_grouping():
    s = mirrored(2)
    seen = {}

    def merge(st, a, b, c, d, k):
        seen.update(
            a=type(a).__name__,
            b=b,
            c=c,
            d=[type(d).__name__, type(d[0]).__name__],
            k=type(k).__name__,
        )
        return 0

    s.run(lambda: rc().merge_call(merge, args=(rid(), 5, "x", [rid()]), kwargs={"k": rid()}))
    return seen


@case()
def mc_docs_example():
    s = mirrored(2)

    def merge(d, x):
        return sum(d.experimental_local_results(x))

    def f(three):
        v = three + rid()
        t = rc().merge_call(merge, args=(v,))
        return t + v

    return s.run(f, args=[3])


@case()
def mc_reduce_inside_merge():
    s = mirrored(2)
    return s.run(
        lambda: rc().merge_call(lambda st, x: st.reduce("SUM", x, axis=None), args=(frid() + 1.0,))
    )


@case()
def mc_run_inside_merge():
    s = mirrored(2)

    def merge(st, x):
        return st.run(lambda y: y * 2.0, args=(x,))

    return s.run(lambda: rc().merge_call(merge, args=(frid() + 1.0,)))


@case()
def mc_structure_mismatch():
    s = mirrored(2)
    return s.run(lambda: rc().merge_call(lambda st, d: 0, args=({f"k{int(rid())}": 1},)))


@differs()
def mc_in_nested_compiled():
    s = mirrored(2)

    @px.function
    def g():
        return rc().merge_call(lambda st: 1)

    def f():
        return g()

    assert s.run(f) == 1


@case()
def mc_sequential_execution_order():
    s = mirrored(2)
    log = []

    def f():
        r = int(rid())
        log.append(f"a{r}")
        rc().merge_call(lambda st: log.append("m"))
        log.append(f"b{r}")

    s.run(f)
    return log


# -- reduce_to, broadcast_to, update -------------------------------------------------------------


@case()
def rt_list_destinations():
    s = mirrored(2)
    value = dist(s, V(1.0, 2.0))
    return s.extended.reduce_to("SUM", value, destinations=["CPU:0", "CPU:1"])


@case()
def rt_variable_aggregation_as_op():
    s = mirrored(2)
    value = dist(s, V(1.0, 2.0))
    return s.extended.reduce_to(px.VariableAggregation.SUM, value, destinations="CPU:0")


@case()
def rt_mirrored_sum():
    s = mirrored(2)
    m = s.extended.reduce_to("SUM", s.run(lambda: fresh(1.0)), destinations=s.run(lambda: fresh(1.0)))
    assert isinstance(m, px.Mirrored)
    return s.extended.reduce_to("SUM", m, destinations="CPU:0")


@differs()
def brt_mixed_int_float():
    s = mirrored(2)
    with s.scope():
        v = px.Variable(0.0)
    pairs = [(s.run(lambda: fresh(frid())), v), (s.run(lambda: fresh(rid())), v)]
    real, whole = s.extended.batch_reduce_to("SUM", pairs)
    assert isinstance(real, px.Mirrored)
    assert isinstance(whole, px.Mirrored)
    assert (real.dtype, whole.dtype) == (jnp.float32, jnp.int32)
    assert floats(real) == floats(whole) == [1.0, 1.0]


@case()
def upd_group_false():
    s = mirrored(2)
    with s.scope():
        v = px.Variable(5.0)
    return s.extended.update(v, lambda c: fresh(c.assign_add(1.0)), group=False)


@case()
def upd_mirrored_arg():
    s = mirrored(2)
    with s.scope():
        v = px.Variable(5.0)
    m = s.extended.reduce_to("SUM", dist(s, V(1.0, 2.0)), destinations=v)
    s.extended.update(v, lambda c, x: c.assign_add(x), args=(m,))
    return comps(v)


@differs()
def upd_in_replica_context():
    s = mirrored(2)
    with s.scope():
        v = px.Variable(5.0)

    def f(x):
        s.extended.update(v, lambda c, x: c.assign_add(x), args=(x,))

    with pytest.raises(px.errors.DivergenceError):
        s.run(lambda: f(frid() + 1.0))
    assert comps(v) == [5.0, 5.0]
    s.run(lambda: f(frid() * 0.0 + 1.0))  # equal values are fine
    assert comps(v) == [6.0, 6.0]


@case()
def upd_docs_step_fn():
    def run(s):
        with s.scope():
            v = px.Variable(0.0)

            def step(var):
                def merge(st, value, var):
                    red = st.extended.reduce_to(px.ReduceOp.SUM, value, destinations=var)
                    st.extended.update(var, lambda var, value: var.assign(value), args=(red,))

                rc().merge_call(merge, args=(fresh(1.0), var))

            s.run(step, args=(v,))
            return comps(v)

    return {
        "mirrored": run(mirrored(2)),
        "one": run(px.OneDeviceStrategy("CPU:0")),
        "central": run(central()),
    }


@case()
def bc_none_destination():
    s = mirrored(2)
    with s.scope():
        return s.extended.broadcast_to(jnp.array(3.0), destinations=None)


@case()
def bc_one_device_string():
    s = mirrored(2)
    with s.scope():
        r = s.extended.broadcast_to(jnp.array(3.0), destinations="CPU:1")
    return [class_name(r), r]


@case()
def nonslot_devices():
    s = mirrored(2)
    n = []
    with s.scope():
        v = px.Variable(0.0)
        d = s.extended.non_slot_devices([v])
        s.extended.update_non_slot(d, lambda: n.append(1))
    return {"devices": [x[-5:] for x in d], "calls": len(n)}


# -- CrossDeviceOps ------------------------------------------------------------------------------


def reduce_and_gather(ops: px.CrossDeviceOps) -> dict[str, Any]:
    s = mirrored(2, cross_device_ops=ops)
    return {
        "reduce": s.reduce("SUM", s.run(lambda: frid() + 1.0), axis=None),
        "gather": s.gather(s.run(lambda: jnp.reshape(frid(), [1])), axis=0),
    }


@case()
def cdo_reduce_single_plain_tensor():
    t = jnp.array(2.0)
    r = px.ReductionToOneDevice().reduce(px.ReduceOp.SUM, t, t)
    return [class_name(r), r]


@case()
def cdo_base_class_not_implemented():
    s = mirrored(2)
    p = s.run(lambda: fresh(frid()))
    return px.CrossDeviceOps().reduce(px.ReduceOp.SUM, p, "CPU:0")


@case()
def cdo_custom_subclass():
    class C(px.CrossDeviceOps):
        def reduce_implementation(self, op, p, dest, options):
            return self.broadcast(sum(p.values) + 100.0, dest)

        def batch_reduce_implementation(self, op, pairs, options):
            return [self.reduce_implementation(op, v, d, options) for v, d in pairs]

    s = mirrored(2, cross_device_ops=C())
    return s.run(lambda: rc().all_reduce("SUM", frid() + 1.0))


# -- options -------------------------------------------------------------------------------------


@case()
def opt_communication_options():
    Options = px.experimental.CommunicationOptions
    a = Options()
    b = Options(bytes_per_pack=5, timeout_seconds=1.5, implementation="ring")
    return [
        [a.bytes_per_pack, a.timeout_seconds, a.implementation],
        [b.bytes_per_pack, b.timeout_seconds, b.implementation],
        str(a),
    ]


# -- one expression each ---------------------------------------------------------------------------

cases(
    {
        "cdo_ReductionToOneDevice_reduce_gather": lambda: reduce_and_gather(px.ReductionToOneDevice()),
        "cdo_HierarchicalCopyAllReduce_reduce_gather": lambda: reduce_and_gather(
            px.HierarchicalCopyAllReduce()
        ),
        "cdo_NcclAllReduce_reduce_gather": lambda: reduce_and_gather(px.NcclAllReduce()),
        "cdo_HierarchicalCopy_packs0_reduce_gather": lambda: reduce_and_gather(
            px.HierarchicalCopyAllReduce(num_packs=0)
        ),
        "opt_negative_bytes": lambda: px.experimental.CommunicationOptions(bytes_per_pack=-1),
        "opt_bad_implementation_string": lambda: px.experimental.CommunicationOptions(
            implementation="mpi"
        ),
    }
)
