"""Packing plans: complete, disjoint, of one kind, and within their limits."""

from __future__ import annotations

from hypothesis import given, strategies as st

from phalanx.collectives.packing import BETWEEN_WORKERS, SMALL_TENSOR_BYTES, Packing, plan_packs

sizes = st.lists(st.integers(0, 4 * SMALL_TENSOR_BYTES), max_size=20)
packings = st.one_of(
    st.just(Packing()),
    st.integers(1, 10**6).map(lambda n: Packing(bytes_per_pack=n)),
    st.integers(0, 5).map(lambda n: Packing(num_packs=n)),
    st.just(BETWEEN_WORKERS),
)


@given(sizes, st.data(), packings)
def test_every_tensor_travels_exactly_once_with_its_own_kind(
    sizes: list[int], data: st.DataObject, packing: Packing
) -> None:
    count = len(sizes)
    kinds = data.draw(st.lists(st.sampled_from("fib"), min_size=count, max_size=count))
    packs = plan_packs(sizes, kinds, packing)
    assert sorted(i for pack in packs for i in pack) == list(range(len(sizes)))
    for pack in packs:
        assert pack
        assert pack == sorted(pack)
        assert len({kinds[i] for i in pack}) == 1


@given(sizes, st.integers(1, 10**6))
def test_packs_keep_their_size(sizes: list[int], limit: int) -> None:
    for pack in plan_packs(sizes, ["f"] * len(sizes), Packing(bytes_per_pack=limit)):
        assert len(pack) == 1 or sum(sizes[i] for i in pack) <= limit


@given(sizes)
def test_small_tensors_travel_together_and_large_ones_alone(sizes: list[int]) -> None:
    packs = plan_packs(sizes, ["f"] * len(sizes), Packing())
    small = [i for i, n in enumerate(sizes) if n <= SMALL_TENSOR_BYTES]
    assert (small in packs) == bool(small)
    assert len(packs) == len(sizes) - len(small) + bool(small)


@given(sizes, st.integers(1, 5))
def test_the_number_of_packs(sizes: list[int], n: int) -> None:
    assert len(plan_packs(sizes, ["f"] * len(sizes), Packing(num_packs=n))) <= max(2 * n, 1)


def test_no_packing() -> None:
    assert plan_packs([1, 1], ["f", "f"], Packing(num_packs=0)) == [[0], [1]]


@given(st.lists(st.integers(0, 600 * 1024), max_size=40))
def test_between_workers_packs_are_larger_but_bounded(sizes: list[int]) -> None:
    small, limit = BETWEEN_WORKERS.small_bytes, BETWEEN_WORKERS.small_packs_bytes
    assert limit is not None
    packs = plan_packs(sizes, ["f"] * len(sizes), BETWEEN_WORKERS)
    assert all(len(p) == 1 or all(sizes[i] <= small for i in p) for p in packs)
    filled = [sum(sizes[i] for i in p) for p in packs if all(sizes[i] <= small for i in p)]
    assert all(n <= limit for n in filled)
    assert all(n > limit - small for n in filled[:-1])
