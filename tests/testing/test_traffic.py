"""What `px.testing.communication` counts, in real programs and in the text of others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import phalanx as px
from phalanx import VariableAggregation as A
from phalanx.testing.traffic import parse_hlo

Traffic = px.testing.Traffic
Communication = px.testing.Communication


def two() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


def ctx() -> px.ReplicaContext:
    context = px.get_replica_context()
    assert context is not None
    return context


def ones(strategy: px.Strategy, *shape: int) -> Any:
    return strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(shape))


# -- real programs -------------------------------------------------------------------------------


def test_every_kind_of_collective() -> None:
    n = 4
    mesh = Mesh(np.array(jax.devices()[:n]), ("i",))

    def body(x: jax.Array) -> Any:
        ring = [(i, (i + 1) % n) for i in range(n)]
        return (
            jax.lax.psum(x, "i"),
            jax.lax.all_gather(x, "i"),
            jax.lax.psum_scatter(x, "i", tiled=True),
            jax.lax.all_to_all(x, "i", 0, 0, tiled=True),
            jax.lax.ppermute(x, "i", ring),
        )

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=PartitionSpec("i"),
        out_specs=(PartitionSpec(), PartitionSpec(), *[PartitionSpec("i")] * 3),
        check_vma=False,
    )
    once = Traffic(1, 8 * 3 * 4)  # what each device holds
    assert px.testing.communication(jax.jit(mapped), jnp.ones((8 * n, 3))) == Communication(
        all_reduce=once,
        all_gather=once,
        reduce_scatter=once,
        all_to_all=once,
        collective_permute=once,
    )


def test_functions_jit_objects_and_plain_callables_are_alike() -> None:
    s = two()
    x = ones(s, 10)

    def total(x: Any) -> Any:
        return s.run(lambda x: ctx().all_reduce("sum", x), args=(x,))

    expected = Communication(all_reduce=Traffic(1, 40))
    assert px.testing.communication(total, x) == expected
    assert px.testing.communication(px.function(total), x=x) == expected
    assert px.testing.communication(jax.jit(total), x) == expected
    assert px.testing.communication(s.run, px.function(lambda x: ctx().all_reduce("sum", x)), (x,)) == (
        expected
    )


def test_merged_collectives_count_once_with_all_their_bytes() -> None:
    s = two()
    with s.scope():
        variables = [px.Variable(jnp.zeros(n), aggregation=A.SUM) for n in (10, 20, 30)]

    def step(x: jax.Array) -> None:
        for v in variables:
            v.assign_add(jnp.broadcast_to(x, v.shape))

    report = px.testing.communication(s.run, step, (ones(s, 1),))
    assert report.bytes == report.all_reduce.bytes == 4 * 60
    assert report.count == 1


def test_what_needs_no_communication_has_none() -> None:
    one = px.OneDeviceStrategy("CPU:0")
    report = px.testing.communication(one.run, lambda x: ctx().all_reduce("sum", x), (jnp.ones(3),))
    assert (report.count, report.bytes) == (0, 0)
    assert str(report).splitlines()[1:] == ["total      0      0"]
    s = two()
    assert px.testing.communication(s.run, jnp.sin, (ones(s, 3),)) == Communication()


def test_nothing_runs() -> None:
    s = two()
    with s.scope():
        v = px.Variable(0.0, aggregation=A.SUM)
    px.testing.communication(s.run, v.assign_add, (ones(s),))
    assert float(v) == 0.0


def test_steps_that_have_no_program() -> None:
    s = two()
    unlike = s.experimental_distribute_values_from_function(
        lambda c: jnp.ones((2,) * (c.replica_id_in_sync_group + 1))
    )
    with pytest.raises(RuntimeError, match="different ranks"):
        px.testing.communication(s.run, jnp.sum, (unlike,))
    with pytest.raises(TypeError, match="callable"):
        px.testing.communication(3)  # type: ignore[arg-type]


# -- the assertion -------------------------------------------------------------------------------


def test_the_assertion_passes_at_its_limit_and_fails_beyond_it() -> None:
    s = two()
    x = ones(s, 10)

    def step(x: jax.Array, *, scale: float = 1.0) -> Any:
        return ctx().all_reduce("sum", x * scale), ctx().all_gather(x, axis=0)

    run = px.function(lambda x, scale=1.0: s.run(step, args=(x,), kwargs={"scale": scale}))
    px.testing.assert_communication(run, x, scale=2.0, max_collectives=2, max_bytes=80)
    with pytest.raises(AssertionError, match=r"has 2 collectives, and 1 are allowed.\nkind"):
        px.testing.assert_communication(run, x, max_collectives=1)
    with pytest.raises(AssertionError, match="communicates 80 bytes, and 79 are allowed"):
        px.testing.assert_communication(run, x, max_collectives=2, max_bytes=79)
    with pytest.raises(ValueError, match="Say what to check"):
        px.testing.assert_communication(run, x)


# -- the text of programs for other platforms ----------------------------------------------------


def test_asynchronous_collectives_count_where_they_start() -> None:
    text = """
ENTRY %main (a: f32[128], b: bf16[4,2]) -> f32[128] {
  %a = f32[128]{0} parameter(0)
  %b = bf16[4,2]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %start = (f32[128]{0}, f32[128]{0}) all-gather-start(%a), replica_groups=[1,8]<=[8], dimensions={0}
  %done = f32[1024]{0} all-gather-done(%start)
  %r = f32[128]{0} all-reduce-start(%a), channel_id=3, to_apply=%add
  %rd = f32[128]{0} all-reduce-done(%r)
  %p = (bf16[4,2]{1,0}, bf16[4,2]{1,0}, u32[], u32[]) collective-permute-start(%b), channel_id=4
  ROOT %pd = bf16[4,2]{1,0} collective-permute-done(%p)
}
"""
    assert parse_hlo(text) == Communication(
        all_reduce=Traffic(1, 512), all_gather=Traffic(1, 512), collective_permute=Traffic(1, 16)
    )


def test_wrapped_asynchronous_collectives_count_inside_their_computation() -> None:
    text = """
%wrapped (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%p), dimensions={0}, to_apply=%add
}

ENTRY %main (p: f32[64]) -> f32[2] {
  %p = f32[64]{0} parameter(0)
  %s = ((f32[8]{0}), f32[2]{0}, s32[]) async-start(%p), calls=%wrapped
  ROOT %d = f32[2]{0} async-done(%s), calls=%wrapped
}
"""
    assert parse_hlo(text) == Communication(reduce_scatter=Traffic(1, 32))


def test_shapes_in_all_their_spellings() -> None:
    text = """
ENTRY main {
  flags = pred[3]{0} parameter(0)
  half = s4[3]{0} parameter(1)
  key = c128[<=2,2]{1,0} parameter(2)
  token = token[] after-all()
  empty = f32[0,5]{1,0} parameter(3)
  all = (pred[3]{0}, s4[3]{0}) all-reduce(flags, half, key, empty, /*index=4*/f32[] %inline)
  ragged = f32[4]{0} ragged-all-to-all(f8e4m3fn[4]{0} %x, u16[2]{0} %y)
  ROOT cast = f32[7]{0} collective-broadcast(f32[7]{0:T(256)} %z)
}
"""
    assert parse_hlo(text) == Communication(
        all_reduce=Traffic(1, 3 + 2 + 64 + 0 + 4),
        all_to_all=Traffic(1, 4 + 4),
        collective_broadcast=Traffic(1, 28),
    )


def test_names_that_merely_look_like_collectives() -> None:
    text = """
ENTRY %main {
  %all-reduce.1 = f32[2]{0} add(%a, %b), metadata={op_name="all-reduce(x)"}
  %get = f32[2]{0} get-tuple-element(%all-gather), index=0
  %fused = f32[2]{0} fusion(%all-reduce.1), kind=kLoop, calls=%all-reduce
}
"""
    assert parse_hlo(text) == Communication()
