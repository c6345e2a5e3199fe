"""Wrong arguments end in errors that say what was wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

import phalanx as px


def replica() -> px.ReplicaContext:
    context = px.get_replica_context()
    assert context is not None
    return context


def bad_calls() -> dict[str, tuple[Callable[[px.Strategy], Any], type[Exception], str]]:
    return {
        "variable_created_in_scope": (
            lambda s: s.extended.variable_created_in_scope(3),  # type: ignore[arg-type]
            TypeError,
            "needs a px.Variable. Received: 3",
        ),
        "read_var": (
            lambda s: s.extended.read_var(3),  # type: ignore[arg-type]
            TypeError,
            "needs a px.Variable. Received: 3",
        ),
        "broadcast_to": (
            lambda s: s.extended.broadcast_to("abc", "CPU:0"),
            TypeError,
            "needs numbers or arrays. Received: 'abc'",
        ),
        "batch_reduce_to": (
            lambda s: s.extended.batch_reduce_to("sum", None),  # type: ignore[arg-type]
            TypeError,
            "pairs. Received: None",
        ),
        "merge_call arguments": (
            lambda s: s.run(lambda: replica().merge_call(lambda s: None, args=3)),  # type: ignore[arg-type]
            ValueError,
            r"write args=\(x,\). Received: 3 of type int",
        ),
        "merge_call keywords": (
            lambda s: s.run(lambda: replica().merge_call(lambda s: None, kwargs=3)),  # type: ignore[arg-type]
            ValueError,
            "a dict or None. Received: 3",
        ),
        "a branch on the replica in jax.jit": (
            lambda s: jax.jit(lambda: s.run(lambda: 1 if replica().replica_id_in_sync_group else 2))(),
            px.errors.StagedValueError,
            r"test_checks.py:\d+ in <lambda>.*jnp\.where or jax\.lax\.cond",
        ),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_calls_say_what_was_wanted(name: str) -> None:
    call, error, message = bad_calls()[name]
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope(), pytest.raises(error, match=message) as caught:
        call(strategy)
    assert isinstance(caught.value, px.errors.PhalanxError)


@pytest.mark.parametrize(
    "make", [px.get_strategy, lambda: px.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])]
)
@pytest.mark.parametrize("variables", [[], [3], 3])
def test_non_slot_devices_need_variables(make: Callable[[], px.Strategy], variables: Any) -> None:
    with pytest.raises(px.errors.PhalanxError, match=r"non_slot_devices needs .* Received: "):
        make().extended.non_slot_devices(variables)
