"""Translations of the recorded cases about several workers; answers are by worker."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import phalanx as px
from tests.conformance.harness import case, comps, differs, dist, encode, fresh, frid, rc
from tests.conformance.input import R, opt, vals

A = px.VariableAggregation
PEER = 1

MEASURED: dict[str, Callable[[px.MultiWorkerMirroredStrategy], Any]] = {}


def on_workers(fn: Callable[[px.MultiWorkerMirroredStrategy], Any]) -> Callable[..., Any]:
    """Register what two workers do for a case; they answer all cases in one go."""
    MEASURED[fn.__name__] = fn
    return fn


def same_answer(fn: Callable[[px.MultiWorkerMirroredStrategy], Any]) -> Callable[..., Any]:
    """Register a case in which workers must answer as TensorFlow's did."""
    case(fn.__name__)(lambda: answer(fn.__name__))
    return on_workers(fn)


def answer(name: str) -> dict[str, Any]:
    return {f"worker{i}": answers[name] for i, answers in enumerate(_answers())}


@functools.cache
def _answers() -> list[dict[str, Any]]:
    with px.testing.MultiProcess(2, preload=["phalanx"], env={"PHALANX_DEADLINE": "30"}) as cluster:
        return cluster.run(_measure, list(MEASURED), timeout=120.0)


def _measure(names: list[str]) -> dict[str, Any]:
    strategy = px.MultiWorkerMirroredStrategy()
    answers = {}
    for name in names:
        try:
            answers[name] = encode(MEASURED[name](strategy))
        except (px.errors.PhalanxError, NotImplementedError) as error:
            kinds = [k.__name__ for k in type(error).__mro__]
            answers[name] = {"raises": kinds, "message": str(error)}
    return answers


def local(s: px.Strategy, x: Any) -> Any:
    """What the one replica of this worker has, which TensorFlow returns as it is."""
    (mine,) = s.experimental_local_results(x)
    return mine


def me(s: px.MultiWorkerMirroredStrategy) -> int:
    return s.cluster_resolver.task_id or 0


def var(s: px.Strategy, value: Any, **kinds: Any) -> px.Variable:
    with s.scope():
        return px.Variable(value, **kinds)


# -- values and variables ----------------------------------------------------------------------------


@same_answer
def mw_variable_init_broadcast(s: px.MultiWorkerMirroredStrategy) -> Any:
    v = var(s, 10.0 * (me(s) + 1))
    return {"class": type(v).__name__, "copies": comps(v)}


@same_answer
def mw_reduce_axis0_partial(s: px.MultiWorkerMirroredStrategy) -> Any:
    return s.reduce("MEAN", dist(s, [jnp.array([1.0, 2.0, 3.0]), jnp.array([10.0])]), axis=0)


@same_answer
def mw_local_results(s: px.MultiWorkerMirroredStrategy) -> Any:
    return s.experimental_local_results(s.run(lambda: fresh(frid())))


@same_answer
def mw_all_reduce(s: px.MultiWorkerMirroredStrategy) -> Any:
    def both() -> Any:
        return rc().all_reduce("SUM", frid() + 1.0), rc().all_reduce("MEAN", frid() + 1.0)

    return tuple(local(s, x) for x in px.function(lambda: s.run(both))())


@on_workers
def mw_assign_sum(s: px.MultiWorkerMirroredStrategy) -> Any:
    v, w = var(s, 10.0, aggregation=A.SUM), var(s, 0.0, aggregation=A.ONLY_FIRST_REPLICA)
    s.run(lambda: v.assign_add(frid() + 1.0))
    s.run(lambda: w.assign(frid() + 1.0))
    return {"sum": [x.tolist() for x in comps(v)], "only_first": [x.tolist() for x in comps(w)]}


@differs("mw_assign_sum")
def only_first_is_of_all_workers() -> None:
    expected = {"sum": [13.0], "only_first": [1.0]}
    assert answer("mw_assign_sum") == {"worker0": expected, "worker1": expected}


@same_answer
def mw_on_read(s: px.MultiWorkerMirroredStrategy) -> Any:
    v = var(s, 0.0, synchronization=px.VariableSynchronization.ON_READ, aggregation=A.SUM)
    s.run(lambda: v.assign(frid() + 1.0))
    return {"local": local(s, s.run(lambda: v + 0.0)), "cross": v.numpy(), "copies": comps(v)}


@on_workers
def mw_cross_assign_differs(s: px.MultiWorkerMirroredStrategy) -> Any:
    v = var(s, 0.0)
    with s.scope(), pytest.raises(px.errors.DivergenceError, match="different workers"):
        v.assign(5.0 + me(s))
    return [x.tolist() for x in comps(v)]


@differs("mw_cross_assign_differs")
def workers_cannot_assign_different_values() -> None:
    assert answer("mw_cross_assign_differs") == {"worker0": [0.0], "worker1": [0.0]}


# -- input -------------------------------------------------------------------------------------------


@same_answer
def mw_dataset_range10_batch4_AUTO(s: px.MultiWorkerMirroredStrategy) -> Any:
    return vals(s.experimental_distribute_dataset(opt(R(10).batch(4), "AUTO")))


@same_answer
def mw_dataset_range5_batch2_AUTO(s: px.MultiWorkerMirroredStrategy) -> Any:
    return vals(s.experimental_distribute_dataset(opt(R(5).batch(2), "AUTO")))


@same_answer
def mw_dataset_range9_batch3_DATA(s: px.MultiWorkerMirroredStrategy) -> Any:
    return vals(s.experimental_distribute_dataset(opt(R(9).batch(3), "DATA")))


@same_answer
def mw_dataset_uneven_workers(s: px.MultiWorkerMirroredStrategy) -> Any:
    return vals(s.distribute_datasets_from_function(lambda c: R([3, 1][me(s)]).batch(1)))


@same_answer
def mw_element_spec(s: px.MultiWorkerMirroredStrategy) -> Any:
    return s.experimental_distribute_dataset(R(8).batch(4, drop_remainder=True)).element_spec


@same_answer
def mw_optional(s: px.MultiWorkerMirroredStrategy) -> Any:
    iterator = iter(s.experimental_distribute_dataset(R(3).batch(2)))
    return [bool(iterator.get_next_as_optional().has_value()) for _ in range(3)]


@same_answer
def mw_per_replica_mode(s: px.MultiWorkerMirroredStrategy) -> Any:
    mode = px.InputReplicationMode.PER_REPLICA
    options = px.InputOptions(experimental_replication_mode=mode)
    return s.distribute_datasets_from_function(lambda c: R(2), options)


# -- failures ----------------------------------------------------------------------------------------


def failures(fn: Callable[..., Any]) -> list[BaseException | None]:
    with px.testing.MultiProcess(2, preload=["phalanx"], env={"PHALANX_DEADLINE": "30"}) as cluster:
        return [outcome.error for outcome in cluster.start(fn).results(timeout=120.0)]


@differs()
def mw_all_reduce_shape_mismatch() -> None:
    def reduce_different_shapes() -> None:
        s = px.MultiWorkerMirroredStrategy()
        v = dist(s, [jnp.ones(1), jnp.ones(2)])
        s.run(lambda x: rc().all_reduce("SUM", x), args=(v,))

    for error in failures(reduce_different_shapes):
        assert error is not None
        assert isinstance(error.__cause__, px.errors.CollectiveMismatchError), error
        assert "float32[1]" in str(error)
        assert "float32[2]" in str(error)


@differs()
def mw_peer_dies() -> None:
    def reduce_without_peer() -> None:
        s = px.MultiWorkerMirroredStrategy()
        if me(s) == PEER:
            os._exit(3)
        s.run(lambda: rc().all_reduce("SUM", fresh(1.0)))

    survivor, dead = failures(reduce_without_peer)
    assert survivor is not None
    assert isinstance(survivor.__cause__, px.errors.WorkerLostError), survivor
    assert isinstance(survivor.__cause__, px.errors.UnavailableError)
    assert "worker 1" in str(survivor)
    assert "code 3" in str(dead)
