"""The names of torch and MindSpore, in replicas and alone."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest

import phalanx as px
import phalanx.comm.torch as dist
from tests.comm.test_eager_replicas import ranks

c = px.comm


def test_exchanges_that_are_told_their_shapes() -> None:
    def program(rank: int) -> Any:
        x = np.arange(4.0) + 10 * rank
        listed, _ = c.all_to_all_with_output_shape([(rank + 1,), np.zeros(rank + 1)], [x[:1], x[:2]])
        # Cut by the input, not by the output.
        single, _ = c.all_to_all_single_with_output_shape((4,), x)
        uneven, handle = c.all_to_all_single_with_output_shape(
            (2 + 4 * rank,), x, [1 + 2 * rank] * 2, [1, 3], async_op=True
        )
        assert handle is not None
        assert handle.wait()
        out = np.zeros(2 + 4 * rank)
        c.all_to_all_v_c(out, x, [1, 3, 1, 3])
        assert out.tolist() == uneven.value.tolist()
        return [v.tolist() for v in (*listed, single, out)]

    first, second = ranks(2, program)
    assert first == [[0.0], [10.0], [0.0, 1.0, 10.0, 11.0], [0.0, 10.0]]
    assert second[2:] == [[2.0, 3.0, 12.0, 13.0], [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]]
    with pytest.raises(ValueError, match="other sizes than the output shape"):
        ranks(2, lambda r: c.all_to_all_single_with_output_shape((3,), np.ones(4)))
    wrong = lambda r: c.all_to_all_with_output_shape([(1,), (2,)], [np.ones(1)] * 2, None, True)  # noqa: E731
    with pytest.raises(ValueError, match="other sizes than the output shape"):
        ranks(2, lambda r: wrong(r)[1].result())
    with pytest.raises(ValueError, match="must have 4 numbers"):
        ranks(2, lambda r: c.all_to_all_v_c(np.zeros(1), np.zeros(1), [1, 1]))


def test_uneven_parts_into_buffers() -> None:
    def program(rank: int) -> Any:
        whole = np.zeros((3, 2))
        c.all_gather_into_tensor_uneven(whole, np.full((rank + 1, 2), rank + 1.0), [1, 2])
        part = np.zeros(1 + rank)
        handle = c.reduce_scatter_tensor_uneven(part, np.arange(3.0), [1, 2], "sum", async_op=True)
        assert handle is not None
        handle.wait()
        equal = np.zeros(2)
        c.reduce_scatter_tensor_uneven(equal, np.arange(4.0), op="max")
        return whole[:, 0].tolist(), part.tolist(), equal.tolist()

    first, second = ranks(2, program)
    assert first == ([1.0, 2.0, 2.0], [0.0], [0.0, 1.0])
    assert second == ([1.0, 2.0, 2.0], [2.0, 4.0], [2.0, 3.0])
    with pytest.raises(ValueError, match="other sizes than output_split_sizes"):
        ranks(2, lambda r: c.all_gather_into_tensor_uneven(np.zeros(2), np.zeros(1), [2, 0]))
    with pytest.raises(ValueError, match="input_split_sizes must be 2 numbers"):
        ranks(2, lambda r: c.reduce_scatter_tensor_uneven(np.zeros(2), np.zeros(3), [2, 2]))


def test_groups_objects_and_barriers() -> None:
    def program(rank: int) -> Any:
        mine, made = c.new_subgroups(2)
        assert mine is not None
        assert [g.ranks for g in made] == [(0, 1), (2, 3)]
        other, _ = c.new_subgroups_by_enumeration([[3, 0]])
        total, _ = c.all_reduce(np.array(rank), "sum", mine)
        items = [None, None]
        if rank == 0:
            c.send_object_list([{"a": 1}, "x"], 3, other)
        if rank == 3:
            assert c.recv_object_list(items, None, other) == 0
        c.monitored_barrier(timeout=datetime.timedelta(seconds=5))
        return int(total), items, other is not None, c.get_group_rank(mine, mine.ranks[1])

    found = ranks(4, program)
    assert [f[0] for f in found] == [1, 1, 5, 5]
    assert found[3][1] == [{"a": 1}, "x"]
    assert [f[2] for f in found] == [True, False, False, True]
    assert {f[3] for f in found} == {1}
    assert c.get_global_rank(c.Group("g", (7, 3)), 1) == 3
    with pytest.raises(ValueError, match="divisible by group_size"):
        ranks(3, lambda r: c.new_subgroups(2))
    with pytest.raises(TypeError, match="whole number from 1"):
        c.new_subgroups(0)
    with pytest.raises(ValueError, match="one subgroup only"):
        ranks(2, lambda r: c.new_subgroups_by_enumeration([[0], [0, 1]]))
    compiled = px.function(px.MirroredStrategy(["CPU:0", "CPU:1"]).run)
    with pytest.raises(px.errors.ContextError, match="send_object_list"):
        compiled(lambda: c.send_object_list([1], 0))


def test_torch_takes_ranks_of_groups() -> None:
    """``group_src`` and ``group_dst`` count within the group; ``src`` and ``dst`` do not."""

    def program(rank: int) -> Any:
        g = dist.new_group([1, 0], timeout=datetime.timedelta(seconds=5), group_desc="turned")
        x, y = np.float32([rank]), np.float32([rank])
        dist.broadcast(x, group=g, group_src=0)
        dist.broadcast(y, 0, g, group_src=None)
        total = np.float32([rank + 1.0])
        dist.reduce(total, op=dist.ReduceOp.SUM, group=g, group_dst=1)
        got = np.zeros(1, np.float32)
        handles = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x + rank, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
        )
        for handle in handles:
            handle.wait()
        other = np.zeros(1, np.float32)
        if rank:
            dist.send(x, group=g, group_dst=1)
        else:
            assert dist.recv(other, None, g) == 1
        dist.barrier(g, timeout=datetime.timedelta(seconds=60))
        with pytest.raises(ValueError, match=r"Give src, a rank of all, or group_src"):
            dist.broadcast(x, 1, g, group_src=1)
        first = np.float32([rank])
        dist.broadcast(first, src=None, group=dist.group.WORLD)
        mine, _ = dist.new_subgroups(1, timeout=None, backend="gloo")
        assert mine.ranks == (rank,)
        return [v.tolist() for v in (x, y, total, got, other, first)]

    first, second = ranks(2, program)
    assert first == [[1.0], [0.0], [3.0], [2.0], [1.0], [0.0]]
    assert second == [[1.0], [0.0], [2.0], [1.0], [0.0], [0.0]]
    assert not dist.is_nccl_available()
