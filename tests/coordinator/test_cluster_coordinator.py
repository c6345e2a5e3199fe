"""The coordinator with workers and servers that are threads of this process."""

from __future__ import annotations

import gc
import pickle
import shutil
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.coordinator import jobs
from tests.coordinator.jobs import Gate, Job
from tests.processes import signalled_soon

import phalanx as px
from phalanx.coordinator import checkpoints, cluster_coordinator, worker_service
from phalanx.coordinator.cluster_coordinator import ClusterCoordinator
from phalanx.coordinator.values import NOTHING, load_error, load_value, pack_error, pack_value

TOKEN = "known to all tasks of this test"


@pytest.fixture(scope="module", autouse=True)
def token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_TOKEN", TOKEN)
        yield


@pytest.fixture(scope="module")
def shared(token: None) -> Iterator[Job]:
    """Two workers and two servers for tests that leave nothing behind."""
    with Job(2, 2) as job:
        yield job


@pytest.fixture
def coordinator(shared: Job) -> Iterator[ClusterCoordinator]:
    yield shared.coordinator
    assert shared.coordinator.done(), "a test leaves nothing behind"


@px.function
def double(x: Any) -> Any:
    return x * 2


@px.function
def fail(text: str = "boom") -> None:
    raise KeyError(text)


def gated(gate: Gate, then: Any = lambda: 1) -> px.Function:
    """A new function with a gate in it. Workers of this process share functions, and trace in turns."""
    name = gate.name

    def pass_gate() -> Any:
        jobs.Gate.named(name).pass_through()
        return then()

    return px.function(pass_gate)


def index_of_worker() -> int:
    return px.coordinator.experimental_get_current_worker_index()


# -- results ----------------------------------------------------------------------------------------


def test_results_have_the_structure_that_was_returned(coordinator: ClusterCoordinator) -> None:
    @px.function
    def nest(x: Any, *, y: Any) -> Any:
        return {"sum": x + y, "list": [x, (y,)], "text": "as it is", "none": None}

    value = coordinator.schedule(nest, args=(np.float32(2),), kwargs={"y": jnp.ones(2)})
    fetched, got = value.fetch(), value.get()
    assert type(fetched["sum"]) is np.ndarray
    assert isinstance(got["sum"], jax.Array)
    np.testing.assert_array_equal(fetched["sum"], [3, 3])
    assert fetched["text"] == "as it is"
    assert fetched["none"] is None
    assert value.status is px.coordinator.RemoteValueStatus.READY


def test_nothing_returned_is_none(coordinator: ClusterCoordinator) -> None:
    value = coordinator.schedule(px.function(lambda: None))
    assert value.fetch() is None
    assert value.get() is None


class Crowded(px.coordinator.RemoteValue):
    """A value for which a second thread begins to wait while the first one does."""

    second: threading.Thread | None = None

    @property
    def _bells(self) -> Any:  # type: ignore[override]
        found = self.__dict__.get("bells")
        if self.second is None:
            self.second = threading.Thread(target=self.data)
            self.second.start()
            self.second.join(0.05)  # as far as it gets
        return found

    @_bells.setter
    def _bells(self, bells: Any) -> None:
        self.__dict__["bells"] = bells


def test_several_threads_wait_for_one_value() -> None:
    waiting, rung = threading.Semaphore(0), list[bool]()

    def wait(value: px.coordinator.RemoteValue, bell: Any) -> None:
        waiting.release()
        rung.append(bell.wait(5.0))

    value = Crowded(wait)
    first = threading.Thread(target=value.data)
    first.start()
    assert waiting.acquire(timeout=jobs.TIMEOUT)
    assert waiting.acquire(timeout=jobs.TIMEOUT)
    value.settle(b"")
    assert value.second is not None
    for thread in (first, value.second):
        thread.join(jobs.TIMEOUT)
    assert rung == [True, True]


def test_arguments_are_copied_when_scheduled(coordinator: ClusterCoordinator) -> None:
    array = np.ones(3)
    gate = Gate("copied")
    blockers = [coordinator.schedule(gated(gate)) for _ in range(2)]
    value = coordinator.schedule(double, args=(array,))
    array[:] = 7
    gate.open()
    assert value.fetch().tolist() == [2, 2, 2]
    assert coordinator.fetch(blockers) == [1, 1]


def test_values_of_other_functions_are_arguments(coordinator: ClusterCoordinator) -> None:
    value: Any = 1
    for _ in range(5):
        value = coordinator.schedule(double, args=(value,))
    pair = coordinator.schedule(
        px.function(lambda p: p["a"] + p["b"]), args=({"a": value, "b": value},)
    )
    assert int(value.fetch()) == 32
    assert int(pair.fetch()) == 64


def test_fetch_goes_through_nests(coordinator: ClusterCoordinator) -> None:
    nest = {"a": coordinator.schedule(double, args=(1,)), "b": [5, "x", None]}
    assert coordinator.fetch(nest) == {"a": np.asarray(2), "b": [5, "x", None]}


def test_methods_can_be_scheduled(coordinator: ClusterCoordinator) -> None:
    class Model:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        @px.function
        def call(self, x: Any) -> Any:
            return x * self.factor

    assert int(coordinator.schedule(Model(3).call, args=(2,)).fetch()) == 6


def test_only_compiled_functions_are_scheduled(coordinator: ClusterCoordinator) -> None:
    for wrong in (lambda: 1, 5, None):
        with pytest.raises(TypeError, match=r"px\.function.*Received"):
            coordinator.schedule(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("args", [5, "ab", np.ones(3), {"x": 1}])
def test_arguments_are_a_tuple(coordinator: ClusterCoordinator, args: Any) -> None:
    with pytest.raises(TypeError, match=r"args=\(x,\)"):
        coordinator.schedule(double, args=args)
    with pytest.raises(TypeError, match=r"args=\(x,\)"):
        coordinator.create_per_worker_resource(dict, args)
    assert int(coordinator.schedule(double, args=[2]).fetch()) == 4


@pytest.mark.parametrize("kwargs", [[1], {1: 2}, "ab"])
def test_keyword_arguments_have_names(coordinator: ClusterCoordinator, kwargs: Any) -> None:
    with pytest.raises(TypeError, match="from names to values"):
        coordinator.schedule(double, kwargs=kwargs)


def test_what_cannot_be_sent_is_refused_at_once(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(TypeError, match="sent to another process"):
        coordinator.schedule(double, args=(threading.Lock(),))
    lock = threading.Lock()
    with pytest.raises(TypeError, match="sent to another process"):
        coordinator.schedule(px.function(lock.locked))


def test_a_result_that_cannot_be_sent_is_an_error(coordinator: ClusterCoordinator) -> None:
    def returns_a_lock() -> Any:
        import threading

        return threading.Lock()

    value = coordinator.schedule(px.function(returns_a_lock))
    with pytest.raises(TypeError):
        coordinator.join()
    with pytest.raises(TypeError):
        value.fetch()


# -- errors -----------------------------------------------------------------------------------------


def test_an_error_is_raised_once_with_its_traceback(coordinator: ClusterCoordinator) -> None:
    value = coordinator.schedule(fail, args=("here",))
    with pytest.raises(KeyError, match="here") as raised:
        coordinator.join()
    assert "in fail" in str(raised.value.__cause__)
    coordinator.join()
    assert coordinator.done()
    for _ in range(2):
        with pytest.raises(KeyError, match="here"):
            value.fetch()
    assert value.status is px.coordinator.RemoteValueStatus.ABORTED
    assert int(coordinator.schedule(double, args=(4,)).fetch()) == 8


def test_done_raises_too(coordinator: ClusterCoordinator) -> None:
    value = coordinator.schedule(fail)
    with pytest.raises(KeyError):
        value.fetch()
    with pytest.raises(KeyError):
        coordinator.done()


def test_schedule_raises_and_cancels_what_it_schedules(shared: Job) -> None:
    count = shared.variable(0.0)
    coordinator = shared.coordinator
    value = coordinator.schedule(fail)
    with pytest.raises(KeyError):
        value.fetch()
    add = px.function(lambda: count.assign_add(1.0))
    with pytest.raises(KeyError):
        coordinator.schedule(add)
    coordinator.join()
    assert count.numpy() == 0
    coordinator.schedule(add)
    coordinator.join()
    assert count.numpy() == 1


def test_what_waits_is_cancelled_and_what_runs_ends() -> None:
    with Job(1) as job:
        count = job.variable(0.0)

        def add() -> None:
            count.assign_add(1.0)

        gate = Gate("first")
        coordinator = job.coordinator
        first = coordinator.schedule(gated(gate, add))
        bad = coordinator.schedule(fail)
        later = [coordinator.schedule(gated(gate, add)) for _ in range(70)]
        dependent = coordinator.schedule(double, args=(bad,))
        gate.wait_for()
        gate.open()
        with pytest.raises(KeyError):
            coordinator.join()
        assert first.fetch() is None
        for value in (*later, dependent):
            with pytest.raises(px.errors.CancelledError, match="not run"):
                value.fetch()
        assert count.numpy() == 1
        with pytest.raises(px.errors.ClosureInputError, match="KeyError"):
            coordinator.schedule(double, args=(bad,)).fetch()
        with pytest.raises(px.errors.ClosureInputError):
            coordinator.join()


def test_a_value_that_will_never_be_there_is_not_waited_for() -> None:
    """The error has not been raised yet; a program that waits for a value must not wait for ever."""
    with Job(1) as job:
        gate, coordinator = Gate("first"), job.coordinator
        coordinator.schedule(gated(gate))
        bad = coordinator.schedule(fail)
        later = [coordinator.schedule(double, args=(x,)) for x in (bad, 1, 2)]
        gate.open()
        for value in later:
            with pytest.raises(px.errors.CancelledError, match="not run"):
                value.fetch()
        with pytest.raises(KeyError):
            coordinator.join()
        assert coordinator.done()


def test_closing_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    with Job(2) as job:
        assert int(job.coordinator.schedule(double, args=(2,)).fetch()) == 4
        job.coordinator.close()
    assert "lost" not in caplog.text


class Odd(Exception):
    """An exception that pickle cannot make again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


def test_errors_that_cannot_be_pickled_are_described() -> None:
    error = load_error(pack_error(Odd(1, 2)))
    assert isinstance(error, px.errors.UnknownError)
    assert "Odd: odd" in str(error)
    assert "Odd" in str(error.__cause__)
    assert isinstance(load_error(pack_error(StopIteration())), px.errors.OutOfRangeError)
    assert isinstance(load_error(pack_error(SystemExit(3))), px.errors.UnknownError)
    assert isinstance(load_error(b"garbage"), px.errors.UnknownError)


def test_values_on_their_way() -> None:
    assert pack_value(None) == b""
    assert load_value(NOTHING) is None
    assert load_value(pack_value((1, "two"))) == (1, "two")
    assert load_value(pack_value(lambda: 3))() == 3
    for array in (jnp.float32(1.5), jnp.arange(6).reshape(2, 3), jnp.ones((2, 0), jnp.bfloat16)):
        found = load_value(pack_value(array))
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(found, np.asarray(array))
        found[...] = 0  # it belongs to those who get it


# -- what every worker has ----------------------------------------------------------------------------


@px.function
def take(iterator: Any) -> Any:
    return next(iterator)


@px.function
def take_and_tell(worker: int, iterator: Any) -> Any:
    return worker, next(iterator)


def drawn(coordinator: ClusterCoordinator, iterator: Any, count: int) -> dict[int, list[int]]:
    """What each worker has drawn."""
    found: dict[int, list[int]] = {0: [], 1: []}
    # The workers of this process share its compiled functions, so they must be told who they are.
    worker = coordinator.create_per_worker_resource(index_of_worker)
    for value in [coordinator.schedule(take_and_tell, args=(worker, iterator)) for _ in range(count)]:
        worker, element = value.fetch()
        found[int(worker)].append(int(np.ravel(element)[0]))
    return found


@pytest.mark.parametrize("given", ["dataset", "function", "distributed", "distributed function"])
def test_every_worker_has_the_whole_dataset(
    shared: Job, coordinator: ClusterCoordinator, given: str
) -> None:
    dataset = px.data.Dataset.range(5, 100)
    if "distributed" in given:
        dataset = dataset.batch(1)
    strategy = shared.strategy
    choices = {
        "dataset": dataset,
        "function": lambda: dataset,
        "distributed": strategy.experimental_distribute_dataset(dataset),
        "distributed function": lambda: strategy.distribute_datasets_from_function(
            lambda context: dataset
        ),
    }
    iterator = iter(coordinator.create_per_worker_dataset(choices[given]))
    for elements in drawn(coordinator, iterator, 10).values():
        assert elements == list(range(5, 5 + len(elements)))
    coordinator.join()


def test_the_end_of_a_dataset(coordinator: ClusterCoordinator) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(px.data.Dataset.range(1)))
    values = [coordinator.schedule(take, args=(iterator,)) for _ in range(3)]
    with pytest.raises(px.errors.OutOfRangeError):
        coordinator.join()
    assert any(isinstance(v.error, px.errors.OutOfRangeError) for v in values)


def test_what_a_per_worker_dataset_refuses(shared: Job, coordinator: ClusterCoordinator) -> None:
    with pytest.raises(ValueError, match="Received"):
        coordinator.create_per_worker_dataset([1, 2])
    dataset = coordinator.create_per_worker_dataset(px.data.Dataset.range(3))
    iterator = iter(dataset)
    for method in (lambda: next(iterator), iterator.get_next, lambda: dataset.element_spec):
        with pytest.raises(NotImplementedError):
            method()
    with pytest.raises(NotImplementedError, match="stays on the workers"):
        dataset.values[0].fetch()
    with pytest.raises(TypeError, match="whole PerWorkerValues"):
        coordinator.schedule(take, args=(iterator.values[0],))
    with pytest.raises(TypeError, match="pickled only for them"):
        pickle.dumps(iterator)
    with pytest.raises(TypeError, match="Each worker needs an iterator of its own"):
        coordinator.schedule(take, args=(iter(px.data.Dataset.range(3)),))
    with pytest.raises(ValueError, match="create_per_worker_dataset"):
        iter(shared.strategy.experimental_distribute_dataset(px.data.Dataset.range(3).batch(1)))


@pytest.mark.parametrize("what", ["a variable", "no dataset", "an error"])
def test_a_dataset_that_cannot_be_made(shared: Job, coordinator: ClusterCoordinator, what: str) -> None:
    def make() -> Any:
        if what == "a variable":
            px.Variable(1.0)
        if what == "no dataset":
            return [1, 2]
        raise KeyError("no file")

    dataset = coordinator.create_per_worker_dataset(make)
    value = coordinator.schedule(take, args=(iter(dataset),))
    kind = KeyError if what == "an error" else ValueError
    with pytest.raises(kind):
        dataset.values[0].fetch()
    with pytest.raises(px.errors.ClosureInputError, match="could not make"):
        value.fetch()
    with pytest.raises(px.errors.ClosureInputError):
        coordinator.join()


def test_resources(coordinator: ClusterCoordinator) -> None:
    def make(start: int, *, step: int) -> dict[str, int]:
        index = px.coordinator.experimental_get_current_worker_index()
        return {"at": start + step * index}

    resource = coordinator.create_per_worker_resource(make, (100,), {"step": 10})

    read = px.function(lambda resource: resource["at"])
    gate = Gate("resources")
    blocker = coordinator.schedule(gated(gate))
    gate.wait_for()
    assert coordinator.schedule(read, args=(resource,)).fetch() in (100, 110)
    gate.open()
    blocker.fetch()
    seen = {int(coordinator.schedule(read, args=(resource,)).fetch()) for _ in range(6)}
    assert seen <= {100, 110}
    with pytest.raises(TypeError, match="a function that workers call"):
        coordinator.create_per_worker_resource(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Fetch it"):
        coordinator.create_per_worker_resource(make, (coordinator.schedule(double, args=(1,)),))
    coordinator.join()


def test_per_worker_values_are_remote_values() -> None:
    with pytest.raises(AssertionError, match="RemoteValue"):
        px.coordinator.PerWorkerValues([1, 2])  # type: ignore[list-item]


# -- how long things last -----------------------------------------------------------------------------


def test_nothing_outlasts_its_use(shared: Job, coordinator: ClusterCoordinator) -> None:
    numbers: list[int | None] = []

    def schedule() -> list[weakref.ref[Any]]:
        dataset = coordinator.create_per_worker_dataset(px.data.Dataset.range(3))
        iterator = iter(dataset)
        taken = coordinator.schedule(take, args=(iterator,))
        value = coordinator.schedule(double, args=(taken,))
        assert int(value.fetch()) == 0
        numbers.extend([dataset.resource, iterator.resource])
        return [weakref.ref(x) for x in (dataset, iterator, taken, value)]

    found = schedule()
    coordinator.join()
    coordinator.report()  # the thread has done what it had to
    gc.collect()
    assert [ref() for ref in found] == [None] * 4
    held = [s for s in gc.get_objects() if isinstance(s, worker_service._Session)]
    for _ in range(200):
        coordinator.schedule(double, args=(1,)).fetch()
        if not any(number in session._resources for session in held for number in numbers):
            return
    pytest.fail("workers have not forgotten it")


# -- the coordinator itself ---------------------------------------------------------------------------


def test_there_is_one_for_each_strategy(shared: Job, coordinator: ClusterCoordinator) -> None:
    assert ClusterCoordinator(shared.strategy) is coordinator
    assert coordinator.strategy is shared.strategy
    for kind in (AttributeError, ValueError, TypeError):
        with pytest.raises(kind, match="ParameterServerStrategy"):
            ClusterCoordinator(px.MirroredStrategy(["CPU:0"]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="already"):
        ClusterCoordinator(shared.strategy, restore_from="anywhere")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(coordinator)


def test_reports(shared: Job) -> None:
    coordinator = shared.coordinator
    coordinator.join()
    before = coordinator.report()
    gate = Gate("reported")
    values = [coordinator.schedule(gated(gate)) for _ in range(2)]
    gate.wait_for(2)
    for _ in range(3):
        coordinator.schedule(double, args=(1,))
    report = coordinator.report()
    assert report["queued"] + report["in_flight"] == 5
    assert [w["state"] for w in report["workers"]] == ["up", "up"]
    assert all(w["in_flight"] >= 1 for w in report["workers"])
    gate.open()
    coordinator.join()
    assert coordinator.report()["done"] == before["done"] + 5
    assert values[0].fetch() == 1


def test_a_full_queue_lets_schedule_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(1, window=1) as job:
        monkeypatch.setattr(cluster_coordinator, "QUEUE_LIMIT", 2)
        gate = Gate("full")
        coordinator = job.coordinator
        count = 0

        def produce() -> None:
            nonlocal count
            for _ in range(8):
                coordinator.schedule(gated(gate))
                count += 1

        producer = threading.Thread(target=produce)
        producer.start()
        gate.wait_for()
        producer.join(0.3)
        assert producer.is_alive()
        assert count <= 4
        gate.open()
        producer.join(jobs.TIMEOUT)
        coordinator.join()
        assert count == 8
        assert gate.arrived == 8


def test_ctrl_c_interrupts_a_wait(shared: Job, coordinator: ClusterCoordinator) -> None:
    gate = Gate("interrupted")
    value = coordinator.schedule(gated(gate))
    gate.wait_for()
    for wait in (coordinator.join, value.fetch):
        with pytest.raises(KeyboardInterrupt), signalled_soon(signal.SIGINT):
            wait()
    gate.open()
    coordinator.join()
    assert value.fetch() == 1


def test_many_threads_may_schedule(shared: Job) -> None:
    count = shared.variable(0.0)
    coordinator = shared.coordinator
    add = px.function(lambda: count.assign_add(1.0))

    def schedule() -> None:
        for _ in range(100):
            coordinator.schedule(add)

    threads = [threading.Thread(target=schedule) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    coordinator.join()
    assert count.numpy() == 400


# -- checkpoints --------------------------------------------------------------------------------------


def test_a_coordinator_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    with Job(2, 2) as job:
        counts = [job.variable(0.0) for _ in range(3)]

        def add() -> Any:
            for count in counts:
                count.assign_add(1.0)
            return counts[0] + 0.0

        gate = Gate("checkpoint")
        values = [job.coordinator.schedule(gated(gate, add)) for _ in range(9)]
        last = job.coordinator.schedule(double, args=(values[-1],))
        gate.wait_for(2)
        dispatcher = job.coordinator._dispatcher
        quiet = dispatcher.ask_for_quiet

        def ask_and_open() -> Any:
            question = quiet()
            dispatcher.questions.ask(lambda: (gate.open(),))  # workers have been told to stop before
            return question

        dispatcher.ask_for_quiet = ask_and_open  # type: ignore[method-assign]
        job.coordinator.checkpoint(folder)
        job.coordinator.join()  # it goes on, and what it does is not in the checkpoint
        assert [int(c.numpy()) for c in counts] == [9] * 3
        assert int(last.fetch()) <= 18

        # another coordinator, for which these variables are new
        job.strategy = job.new_strategy()
        Gate("checkpoint").open()
        definitions = [c.definition.id for c in counts]
        counts = [job.variable(0.0) for _ in range(3)]
        assert [c.definition.id for c in counts] == definitions
        coordinator = job.coordinate(job.strategy, restore_from=folder)
        assert 2 <= len(coordinator.restored) <= 7 + 1, "those that ran are not in it"
        coordinator.join()
        assert [int(c.numpy()) for c in counts] == [9] * 3
        assert int(coordinator.restored[-1].fetch()) == 2 * int(coordinator.restored[-2].fetch())


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_coordinator_that_dies_while_it_replaces_a_checkpoint_leaves_one(
    exchanges: bool, tmp_path: Path, shared: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, coordinator = tmp_path / "checkpoint", shared.coordinator
    (tmp_path / ".checkpoint.0123456789ab").mkdir()  # of one that died before
    (tmp_path / ".checkpoint.other").mkdir()
    if not exchanges:
        monkeypatch.setattr(checkpoints, "exchange_names", lambda one, other: False)
    coordinator.checkpoint(folder)
    rename, remove, kept = Path.rename, shutil.rmtree, list[checkpoints.SavedState]()

    def look() -> None:
        kept.append(checkpoints.read(folder))  # what is there if it is killed now
        assert any(kept[-1].folder.glob("ps-*.snapshot"))

    def renamed(self: Path, target: Path) -> Path:
        result = rename(self, target)
        look()
        return result

    def removed(path: Path, **kwargs: Any) -> None:
        look()
        remove(path, **kwargs)
        look()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renamed)
        patch.setattr(shutil, "rmtree", removed)
        coordinator.checkpoint(folder)
    assert {found.folder == folder for found in kept} == ({True} if exchanges else {True, False})
    assert checkpoints.read(folder).folder == folder
    assert sorted(p.name for p in tmp_path.iterdir()) == [".checkpoint.other", "checkpoint"]


@pytest.mark.parametrize("is_file", [False, True])
def test_a_checkpoint_takes_the_place_of_nothing_else(
    tmp_path: Path, coordinator: ClusterCoordinator, is_file: bool
) -> None:
    (tmp_path / "weights").write_text("of another program")
    with pytest.raises(ValueError, match="a directory of its own"):
        coordinator.checkpoint(tmp_path / "weights" if is_file else tmp_path)
    assert (tmp_path / "weights").read_text() == "of another program"
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]


def test_a_checkpoint_that_is_none(tmp_path: Path, shared: Job) -> None:
    with pytest.raises(px.errors.NotFoundError):
        ClusterCoordinator(shared.new_strategy(), restore_from=tmp_path)
    (tmp_path / "queue").write_bytes(b"garbage")
    with pytest.raises(px.errors.DataLossError):
        ClusterCoordinator(shared.new_strategy(), restore_from=tmp_path)
