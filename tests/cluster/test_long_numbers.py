"""Numbers of thousands of digits, which Python does not even print, are clear errors everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.cluster import roles
from phalanx.cluster.spec import ClusterSpec
from phalanx.net.addresses import split_address
from phalanx.net.framing import Limits, Message, encode
from phalanx.runtime.deadlines import worker_deadline

LONG = 10**5000
DIGITS = "9" * 5000
SPEC = {"worker": ["a:1", "b:1"]}
ONE = np.ones(1)

CALLS: dict[str, Any] = {
    "a port": lambda: split_address(f"host:{DIGITS}"),
    "a port of other digits": lambda: split_address("host:²"),
    "an index of a spec": lambda: ClusterSpec({"worker": {LONG: "a:1"}}),
    "a task": lambda: roles.is_chief(SPEC, "worker", LONG),
    "a root": lambda: px.comm.broadcast(ONE, LONG),
    "a receiver": lambda: px.comm.send(ONE, LONG),
    "a group": lambda: px.comm.new_group([LONG]),
    "a message": lambda: encode(Message({"value": LONG}), Limits()),
    "a tag": lambda: px.comm.send(ONE, 0, tag=LONG),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_long_number_is_a_clear_error(what: str) -> None:
    with pytest.raises(px.errors.InvalidValueError, match="Received: ") as raised:
        CALLS[what]()
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("index", [DIGITS, DIGITS[:4000], f'"{DIGITS}"'])
def test_a_long_index_in_tf_config(monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    task = f'{{"type": "worker", "index": {index}}}'
    monkeypatch.setenv("TF_CONFIG", f'{{"cluster": {{"worker": ["a:1", "b:1"]}}, "task": {task}}}')
    with pytest.raises(px.PhalanxError, match="TF_CONFIG"):
        _ = px.cluster_resolver.TFConfigClusterResolver().task_id


@pytest.mark.parametrize("seconds", [DIGITS, "1e999", "inf", "nan", "-1"])
def test_a_deadline_must_come_one_day(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("PHALANX_DEADLINE", seconds)
    with pytest.raises(px.errors.InvalidValueError, match="PHALANX_DEADLINE must be a positive"):
        worker_deadline()
