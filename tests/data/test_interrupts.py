"""Interrupts: every element is delivered once, in order, and the position is always right."""

from __future__ import annotations

import contextlib
import dis
import gc
import itertools
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.data.interrupting import (
    Interrupt,
    SoftInterrupt,
    alarms,
    interrupt_at,
    interrupted_loop,
)

import phalanx as px
from phalanx.data.run.element_queue import ElementQueue
from phalanx.runtime.call_site import where_is

D = px.data.Dataset
COUNT = 120

# What a handler raises in a finalizer, for example in JAX's, is reported and lost.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def numbers() -> Iterator[int]:
    yield from range(COUNT)


def same(x: Any) -> Any:
    return x


PLANS: dict[str, Callable[[], Any]] = {
    "range": lambda: D.range(COUNT),
    "generator function": lambda: D.from_generator(numbers),
    "map, shuffle, batch": lambda: D.range(COUNT).map(same).shuffle(20, 3, False).batch(3),
    "filter and unbatch": lambda: D.range(COUNT).batch(4).unbatch().filter(lambda x: x % 3 != 1),
    "prefetch": lambda: D.range(COUNT).batch(2).prefetch(3),
    "map in threads": lambda: D.range(COUNT).map(same, num_parallel_calls=2).batch(2),
    "interleave in threads": lambda: D.range(8).interleave(
        lambda x: D.range(15), 3, 2, num_parallel_calls=2
    ),
    "cache": lambda: D.range(COUNT).map(same).cache().repeat(2),
}


def plain(elements: list[Any]) -> list[Any]:
    return [np.asarray(x).tolist() for x in elements]


@pytest.fixture(autouse=True, scope="module")
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith(("px-", "phalanx-input")):
            thread.join(30)
            assert not thread.is_alive(), where_is(thread.ident)


def check_plan(name: str, kind: type[BaseException], interrupts: int, seed: int) -> None:
    dataset, rng, count = PLANS[name](), random.Random(seed), 0
    with iter(dataset) as iterator:
        expected = plain(list(iterator))
    # Whoever is interrupted by a plain exception may make another one of it: a function, or JAX.
    kinds = (Exception,) if kind is SoftInterrupt else (kind,)
    with alarms(kind):
        while count < interrupts:
            with iter(dataset) as iterator:
                found, came = interrupted_loop(iterator, rng, 1e-3, kinds)
                assert plain(found) == expected
                assert iterator.state()["index"] == len(expected)
                count += came + 1


@pytest.mark.parametrize("plan", PLANS)
def test_loops_over_datasets_lose_nothing(plan: str) -> None:
    check_plan(plan, Interrupt, 25, seed=1)


def test_handlers_may_raise_plain_exceptions() -> None:
    check_plan("map, shuffle, batch", SoftInterrupt, 25, seed=2)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [Interrupt, SoftInterrupt])
@pytest.mark.parametrize("plan", PLANS)
def test_loops_over_datasets_lose_nothing_for_long(plan: str, kind: type[BaseException]) -> None:
    check_plan(plan, kind, 1500, seed=3)


@pytest.mark.parametrize("get", [next, lambda iterator: iterator.get_next()])
def test_the_position_tells_whether_an_element_was_delivered(get: Any) -> None:
    """An interrupt in the caller's own statement keeps it from being assigned, not from counting."""
    rng = random.Random(5)
    with alarms(), iter(D.range(300).batch(2)) as iterator:
        found: list[Any] = []
        ended = False
        while not ended:
            state = iterator.state()
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 2e-4))
                    while True:
                        element = get(iterator)
                        found.append(element.tolist())
                except (StopIteration, px.errors.OutOfRangeError):
                    ended = True
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                if iterator.state()["index"] > len(found):  # delivered, and lost by the statement above
                    assert iterator.state()["index"] == len(found) + 1
                    iterator.restore({**state, "index": len(found)})
        assert found == [[i, i + 1] for i in range(0, 300, 2)]


def test_no_step_lets_a_handler_in_between_taking_and_returning() -> None:
    steps = [instruction.opname for instruction in dis.get_instructions(ElementQueue.take)]
    delivering = steps[steps.index("FOR_ITER") : steps.index("RETURN_VALUE")]
    handlers_run_after = ("CALL", "JUMP_BACKWARD", "RESUME", "SEND", "YIELD")
    assert not [step for step in delivering if any(name in step for name in handlers_run_after)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: D.range(6),
        lambda: D.from_generator(lambda: range(6)),
        lambda: D.range(6).map(same).prefetch(2),
        lambda: D.range(6).map(same, num_parallel_calls=1),
        lambda: D.range(6).map(same, num_parallel_calls=1, deterministic=False),
    ],
)
def test_an_interrupt_in_any_moment_loses_nothing(make: Any) -> None:
    dataset = make()
    list(dataset)  # learns what there is to learn
    for number in itertools.count(1):
        with iter(dataset) as iterator:
            found = [next(iterator), next(iterator)]
            took_all = False
            with contextlib.suppress(Interrupt):
                # Takes one element, and no statement of the caller's lies in between.
                took_all = interrupt_at(number, lambda: found.extend(itertools.islice(iterator, 1)))
            assert iterator.state()["index"] == len(found)
            found += list(iterator)
        assert sorted(found) == list(range(6)), number
        if took_all:
            break
    assert number > 5


# -- distributed -----------------------------------------------------------------------------------


class Torchlike:
    """An iterable in the style of a torch DataLoader, which has another order each time."""

    def __init__(self) -> None:
        self.order = random.Random(4)
        self.last: list[Any] = []

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[Any]:
        self.last = [np.arange(i, i + 4) for i in range(0, COUNT, 4)]
        self.order.shuffle(self.last)
        return iter(list(self.last))


def batches() -> Iterator[Any]:
    return (np.arange(i, i + 4) for i in range(0, COUNT, 4))


SOURCES: dict[str, Callable[[], Any]] = {
    "dataset": lambda: D.range(COUNT).batch(4),
    "mapped dataset": lambda: D.range(COUNT).map(same).batch(4),
    "generator": batches,
    "iterable": Torchlike,
    "list": lambda: list(batches()),
}


def rows(strategy: Any, element: Any) -> list[int]:
    return [int(x) for part in strategy.experimental_local_results(element) for x in np.asarray(part)]


def check_distributed(source: str, replicas: int, depth: int, interrupts: int, seed: int) -> None:
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    options = px.InputOptions(experimental_per_replica_buffer_size=depth)
    rng, count = random.Random(seed), 0
    with alarms():
        while count < interrupts:
            given = SOURCES[source]()
            distributed = strategy.experimental_distribute_dataset(given, options)
            with iter(distributed) as iterator:
                found, came = interrupted_loop(iterator, rng, 3e-3, (Interrupt,))
                assert iterator.state()["index"] == 30
            expected = given.last if source == "iterable" else batches()
            assert [rows(strategy, x) for x in found] == [x.tolist() for x in expected]
            count += came + 1


@pytest.mark.parametrize(
    ("source", "replicas", "depth"),
    [
        ("dataset", 2, 1),
        ("mapped dataset", 4, 2),
        ("dataset", 2, 0),
        ("generator", 2, 1),
        ("generator", 4, 0),
        ("iterable", 2, 1),
        ("list", 2, 1),
    ],
)
def test_distributed_loops_lose_nothing(source: str, replicas: int, depth: int) -> None:
    check_distributed(source, replicas, depth, 15, seed=6)


@pytest.mark.soak
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("source", SOURCES)
def test_distributed_loops_lose_nothing_for_long(source: str, replicas: int, depth: int) -> None:
    check_distributed(source, replicas, depth, 300, seed=7)


def test_a_position_after_an_interrupt_gives_the_rest() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    distributed = strategy.experimental_distribute_dataset(D.range(40).shuffle(40, seed=1).batch(4))
    with iter(distributed) as iterator:
        state = iterator.state()
        expected = [rows(strategy, x) for x in iterator]
    took_all, number = False, 0
    while not took_all:
        number += 1
        with distributed.iterator(state) as iterator:
            found = [rows(strategy, next(iterator))]
            with contextlib.suppress(Interrupt):
                took_all = interrupt_at(number, lambda: next(iterator))
            index = iterator.state()["index"]
            with distributed.iterator(iterator.state()) as other:
                assert [rows(strategy, x) for x in other] == expected[index:]
            assert [rows(strategy, x) for x in iterator] == expected[index:]
            assert found == expected[:1]
            assert index in (1, 2)


def test_a_generator_that_was_interrupted_at_its_first_element_is_no_empty_one() -> None:
    def interrupted() -> Iterator[Any]:
        raise Interrupt
        yield

    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    distributed = strategy.experimental_distribute_dataset(interrupted())
    with pytest.raises(Interrupt):
        _ = distributed.element_spec
    with pytest.raises(px.errors.AbortedError, match="interrupted when its first element"):
        next(iter(distributed))


# -- several threads -------------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    found: list[Any] = [None] * count
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(i: int) -> None:
        try:
            barrier.wait(30)
            found[i] = work(i)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert errors == []
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_threads_share_an_iterator(plan: str) -> None:
    dataset = PLANS[plan]()
    expected = plain(list(dataset))
    with iter(dataset) as iterator:
        parts = in_threads(8, lambda i: [np.asarray(x).tolist() for x in iterator])
        assert iterator.state()["index"] == len(expected)
    assert sorted(itertools.chain(*parts)) == sorted(expected)
    if "shuffle" not in plan:  # each thread gets its elements in order
        assert all(sorted(part) == part for part in parts) or "interleave" in plan or "cache" in plan


def test_threads_share_a_distributed_iterator() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    for depth in (0, 1):
        options = px.InputOptions(experimental_per_replica_buffer_size=depth)
        distributed = strategy.experimental_distribute_dataset(D.range(COUNT).batch(4), options)
        with iter(distributed) as iterator:
            parts = in_threads(8, lambda i: [rows(strategy, x) for x in iterator])
            assert iterator.state()["index"] == 30
        assert sorted(itertools.chain(*parts)) == [x.tolist() for x in batches()]


@pytest.mark.parametrize("plan", PLANS)
def test_threads_share_a_dataset(plan: str) -> None:
    dataset = PLANS[plan]()
    expected = plain(list(PLANS[plan]()))
    parts = in_threads(8, lambda i: plain(list(dataset)))
    assert parts == [expected] * 8


@pytest.mark.parametrize("kind", ["distributed", "threads"])
def test_closing_can_be_interrupted_and_done_again(kind: str) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = D.range(40).map(same, num_parallel_calls=1).prefetch(2)
    source = strategy.experimental_distribute_dataset(D.range(40).batch(2))
    closed = False
    for number in itertools.count(1):
        iterator = iter(source if kind == "distributed" else dataset)
        next(iterator)
        with contextlib.suppress(Interrupt):
            closed = interrupt_at(number, iterator.close)
        in_threads(1, lambda i: iterator.close())
        assert list(iterator) == []
        if closed:
            break
    assert number > 5
