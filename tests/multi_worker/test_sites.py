"""Whatever communicates remembers the user's own line, and not one of a library."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from tests.multi_worker.faults import me


class Recorder:
    """Notes the sites of programs and operations while a call is made."""

    def __init__(self, s: px.Strategy) -> None:
        from phalanx.collectives import groups

        self.sites: list[str] = []
        member = s.extended._connection.member  # type: ignore[attr-defined]
        agree, wait_of = member.agree, groups.world().wait_of

        def agreed(sequence: int, digest: str, details: Any, *args: Any) -> None:
            self.sites.append(details["site"])
            agree(sequence, digest, details, *args)

        def waited(members: Any, notice: Any) -> Any:
            self.sites.append(notice.site)
            return wait_of(members, notice)

        self._patches = [(member, "agree", agreed), (groups.world(), "wait_of", waited)]

    def of(self, call: Any) -> list[str]:
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for where, name, new in self._patches:
                patch.setattr(where, name, new)
            self.sites.clear()
            call()
            return list(self.sites)


@contextlib.contextmanager
def users_own(call: Any) -> Iterator[None]:
    call()
    yield


def entries(s: px.Strategy) -> dict[str, Any]:
    """Calls that communicate, each in another way; each has a shape of its own, and so is new."""
    c, ctx = px.comm, px.get_replica_context
    value = lambda n: s.experimental_distribute_values_from_function(lambda _: jnp.ones(n))  # noqa: E731

    def variable(n: int, **options: Any) -> px.Variable:
        with s.scope():
            return px.Variable(jnp.zeros(n), **options)

    total = px.VariableAggregation.SUM
    mirrored = variable(7, aggregation=total)

    def inside(work: Any) -> Any:
        return lambda: s.run(work)

    def in_context() -> None:
        with users_own(lambda: s.reduce("sum", value(19), axis=None)):
            pass

    def later() -> None:
        _, handle = c.all_reduce(np.ones(16), async_op=True)
        handle.wait()

    def in_threads() -> None:
        with ThreadPoolExecutor(1) as pool:
            list(pool.map(lambda n: s.reduce("sum", value(n), axis=None), [23]))

    return {
        "variable": lambda: variable(3),
        "variable inside": inside(lambda: mirrored.assign_add(jnp.ones(7))),
        "reduce": lambda: s.reduce("sum", value(4), axis=None),
        "reduce along": lambda: s.reduce("mean", value(5), axis=0),
        "gather": lambda: s.gather(value(6), axis=0),
        "all_reduce": inside(lambda: ctx().all_reduce("sum", jnp.ones(8))),  # type: ignore[union-attr]
        "all_gather": inside(lambda: ctx().all_gather(jnp.ones(9), axis=0)),  # type: ignore[union-attr]
        "merge_call": inside(
            lambda: ctx().merge_call(  # type: ignore[union-attr]
                lambda s, x: s.extended.reduce_to("sum", x, x), args=(jnp.ones(10),)
            )
        ),
        "function": lambda: px.function(
            lambda x: s.run(lambda y: ctx().all_reduce("sum", y), args=(x,))  # type: ignore[union-attr]
        )(value(11)),
        "partial": lambda: functools.partial(s.reduce, "sum", axis=None)(value(12)),
        "tree": lambda: jax.tree.map(lambda x: s.reduce("sum", value(x), axis=None), [13]),
        "library": inside(functools.partial(px.comm.all_reduce, np.ones(14))),
        "with": in_context,
        "threads": in_threads,
        "comm": lambda: c.all_reduce(np.ones(15)),
        "comm later": later,
        "comm objects": lambda: c.all_gather_object({"a": 1}),
        "comm in place": lambda: c.broadcast_(np.ones(17)),
        "comm barrier": c.barrier,
        "comm group": lambda: c.all_reduce(np.ones(18), group=c.new_group([0, 1])),
        "comm map": lambda: list(map(c.all_reduce, [np.ones(20)])),
    }


def sites() -> dict[str, list[str]]:
    s = px.MultiWorkerMirroredStrategy()
    px.comm.init()
    me()
    recorder = Recorder(s)
    return {name: recorder.of(call) for name, call in entries(s).items()}


def test_the_site_of_every_entry_point_is_in_the_users_file() -> None:
    with px.testing.MultiProcess(2, preload=["phalanx", "tests.multi_worker.faults"]) as cluster:
        found = cluster.run(sites)[0]
    assert [name for name, seen in found.items() if not seen] == [], "all of them communicate"
    strangers = {n: s for n, seen in found.items() for s in seen if "test_sites.py:" not in s}
    assert strangers == {}
