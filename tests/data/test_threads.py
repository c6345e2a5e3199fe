"""Threads of datasets: they work ahead, pass on errors, and end with whoever needed them."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.data.ops.prefetching import PrefetchCursor
from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import Cursor
from phalanx.data.plan.opening import CountingCursor
from phalanx.data.run.read_ahead import ReadAhead
from phalanx.data.run.thread_pool import ThreadPool

D = px.data.Dataset
DEADLINE = 30.0


def ints(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


def px_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("px-")]


def all_end() -> bool:
    """Whether all threads of datasets end soon."""
    for thread in px_threads():
        thread.join(DEADLINE)
    return not px_threads()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    assert all_end()
    yield
    gc.collect()
    assert all_end()


# -- prefetching ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 3, 1000, px.data.AUTOTUNE])
def test_prefetching_changes_nothing(size: int) -> None:
    assert ints(D.range(50).prefetch(size)) == list(range(50))
    assert [x.tolist() for x in D.range(7).prefetch(size).batch(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert (
        ints(D.range(10).prefetch(size).map(lambda x: x).prefetch(size).repeat(2)) == [*range(10)] * 2
    )
    assert len(D.range(50).prefetch(size)) == 50


class Source:
    """Numbers that can be held back, and whose reader can be waited for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def __call__(self) -> Iterator[int]:
        self.thread = threading.current_thread()
        for i in range(self.count):
            with self.changed:
                self.read += 1
                self.changed.notify_all()
            yield i

    def wait_for(self, read: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.read >= read, DEADLINE)


def test_prefetching_reads_ahead_in_a_thread_but_not_further_than_told() -> None:
    source = Source(100)
    iterator = iter(D.from_generator(source).prefetch(5))
    assert source.read == 0
    assert px_threads() == []
    assert int(next(iterator)) == 0
    assert source.wait_for(6)
    (thread,) = px_threads()
    assert source.thread is thread
    assert int(next(iterator)) == 1
    assert source.wait_for(7)
    iterator.close()
    assert source.read <= 8
    assert not thread.is_alive()
    assert list(iterator) == []


def test_an_automatic_buffer_grows_when_somebody_waits() -> None:
    go = threading.Semaphore(0)
    source = Source(100)

    def numbers() -> Iterator[int]:
        for i in source():
            assert go.acquire(timeout=DEADLINE)
            yield i

    with iter(D.from_generator(numbers).prefetch(px.data.AUTOTUNE)) as iterator:
        for i in range(8):  # each element is waited for
            go.release()
            assert int(next(iterator)) == i
        for _ in range(92):
            go.release()
        assert source.wait_for(8 + 4)
        assert ints(iterator) == list(range(8, 100))


def test_errors_come_through_after_the_elements_before_them() -> None:
    def numbers() -> Iterator[int]:
        yield 0
        yield 1
        raise OSError("no more")

    iterator = iter(D.from_generator(numbers).prefetch(10).prefetch(10))
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    for _ in range(2):
        with pytest.raises(px.errors.DatasetFunctionError, match="no more") as info:
            next(iterator)
        assert isinstance(info.value.__cause__, OSError)


def test_even_errors_that_are_no_exceptions_come_through() -> None:
    def stop(x: Any) -> Any:
        raise SystemExit(3)

    for dataset in (D.range(3).map(stop).prefetch(1), D.range(3).map(stop, num_parallel_calls=2)):
        with pytest.raises(SystemExit):
            list(dataset)


def test_closing_wakes_whoever_waits() -> None:
    reached, go = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        reached.set()
        assert go.wait(DEADLINE)
        return x

    for dataset in (
        D.range(3).map(slow).prefetch(1),
        D.range(3).map(slow, num_parallel_calls=2),
        D.range(3).interleave(lambda x: D.range(3).map(slow), num_parallel_calls=2),
    ):
        reached.clear()
        go.clear()
        iterator = iter(dataset)
        errors: list[BaseException] = []

        def read(iterator: Any = iterator, errors: list[BaseException] = errors) -> None:
            try:
                next(iterator)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert reached.wait(DEADLINE)
        closer = threading.Thread(target=iterator.close)
        closer.start()
        reader.join(DEADLINE)  # although the function has not returned
        assert not reader.is_alive()
        assert [type(error) for error in errors] == [px.errors.CancelledError]
        go.set()
        closer.join(DEADLINE)
        assert not closer.is_alive()
        assert all_end()


def test_threads_end_when_nobody_has_the_iterator_any_more() -> None:
    endless = D.range(10).repeat()
    for dataset in (
        endless.prefetch(2),
        endless.prefetch(2).prefetch(px.data.AUTOTUNE),
        endless.map(lambda x: x, num_parallel_calls=3),
        endless.map(lambda x: x, num_parallel_calls=3).prefetch(2),
        endless.interleave(lambda x: D.range(100).prefetch(3), 3, num_parallel_calls=2).prefetch(1),
    ):
        for x in dataset:
            assert int(x) >= 0
            break
        del x
        gc.collect()
        assert all_end(), dataset


def test_threads_end_at_the_end_of_the_data_and_after_errors() -> None:
    dataset = D.range(5).map(lambda x: x, num_parallel_calls=2).prefetch(2)
    iterator = iter(dataset)
    assert len(list(iterator)) == 5
    assert all_end()
    failing = iter(D.range(5).map(lambda x: {}[x], num_parallel_calls=2).prefetch(2))
    with pytest.raises(px.errors.DatasetFunctionError):
        next(failing)
    failing.close()
    assert all_end()


def test_closing_twice_and_closing_before_reading() -> None:
    iterator = iter(D.range(5).map(lambda x: x, num_parallel_calls=2).prefetch(2))
    iterator.close()
    iterator.close()
    assert list(iterator) == []
    with iter(D.range(5).prefetch(2)) as other:
        next(other)
        other.close()


class Vanishing(Cursor):
    """A cursor whose thread ends without a word, as in a child of a process that has forked."""

    def read(self, limit: int) -> Chunk | None:
        raise AssertionError("never called")


def test_a_thread_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadAhead, "_work", lambda self, producer, settings: None)
    cursor = PrefetchCursor(Vanishing(), 2)
    with pytest.raises(px.errors.AbortedError, match="gone"):
        cursor.read(1)
    cursor.close()


def test_chunks_are_cut_to_what_was_asked_for() -> None:
    cursor = PrefetchCursor(CountingCursor(range(100)), 50)
    sizes = []
    while (chunk := cursor.read(7)) is not None:
        sizes.append(chunk.count)
    assert sum(sizes) == 100
    assert max(sizes) <= 7
    cursor.close()


# -- the pool -------------------------------------------------------------------------------------


def test_a_pool_does_tasks_and_passes_on_errors() -> None:
    pool = ThreadPool(2, "px-test")
    tasks = [pool.submit(divmod, n, 3) for n in range(3)]
    assert all(pool.wait([task], DEADLINE) for task in tasks)
    assert [task.result() for task in tasks] == [(0, 0), (0, 1), (0, 2)]
    failing = pool.submit(divmod, 1, 0)
    assert pool.wait([failing], DEADLINE)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    pool.close()
    assert all_end()


def test_a_pool_that_is_closed_drops_what_has_not_begun() -> None:
    pool = ThreadPool(1, "px-test")
    begun, go = threading.Event(), threading.Event()

    def first() -> str:
        begun.set()
        go.wait(DEADLINE)
        return "done"

    running = pool.submit(first)
    waiting = pool.submit(first)
    assert begun.wait(DEADLINE)
    pool.stop()
    go.set()
    assert pool.wait([running], DEADLINE)
    assert running.result() == "done"
    with pytest.raises(px.errors.CancelledError):
        waiting.result()
    pool.close()


def test_automatic_parallelism_is_one_thread_per_processor() -> None:
    threads: set[str] = set()

    def note(x: Any) -> Any:
        threads.add(threading.current_thread().name)
        return x

    list(D.range(200).map(note, num_parallel_calls=px.data.AUTOTUNE))
    assert 1 <= len(threads) <= len(os.sched_getaffinity(0))


def test_arrays_pass_through_threads_untouched() -> None:
    x = np.arange(20).reshape(10, 2)
    batches = list(D.from_tensor_slices(x).batch(4).prefetch(2))
    assert all(np.shares_memory(batch, x) for batch in batches)
