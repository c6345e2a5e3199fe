"""Requests and answers as buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from phalanx import errors
from phalanx.net.framing import ProtocolError
from phalanx.parameter_server import wire
from phalanx.parameter_server.commands import perform
from phalanx.parameter_server.requests import Read, Token, Update
from phalanx.parameter_server.store import Outcome, Store, Trace, view_of
from phalanx.parameter_server.updates import METHODS, checked
from phalanx.parameter_server.wire import Kind, Where
from tests.parameter_server.running import variable

tokens = st.builds(Token, st.integers(-(2**62), 2**62), st.integers(0, 2**32 - 1))
TABLE = variable(5, (3, 2), "bfloat16")


def sent(buffers: Any) -> list[bytes]:
    """What arrives of what is sent."""
    return [memoryview(b).tobytes() for b in buffers]


@given(tokens, st.sampled_from(METHODS), st.binary(max_size=9), st.data())
def test_updates_arrive_as_they_were(
    token: Token, method: str, value: bytes, data: st.DataObject
) -> None:
    if method.startswith("scatter"):
        indices = np.array(data.draw(st.lists(st.integers(0, 2), max_size=4)), np.int64)
        update = Update(TABLE, method, np.ones((len(indices), 2)), indices)
    else:
        shape = data.draw(st.sampled_from([(3, 2), (2,), ()])) if method != "apply" else (3, 2)
        update = Update(TABLE, method, np.full(shape, 2.0), None, 7)
    update = checked(update)
    buffers = sent(wire.push(Kind.STAGE, token, [update, update], value))
    assert wire.kind_of(buffers) == Kind.STAGE
    found_token, updates, found_value = wire.read_push(buffers, {5: TABLE}.__getitem__)
    assert (found_token, found_value) == (token, value)
    for found in updates:
        assert (found.variable, found.method, found.optimizer) == (TABLE, method, update.optimizer)
        assert found.values.dtype == update.values.dtype
        np.testing.assert_array_equal(found.values, update.values)
        np.testing.assert_array_equal(found.indices, update.indices)


@given(st.lists(st.tuples(tokens, st.sampled_from(Trace), st.binary(max_size=5))))
def test_inquiries_arrive_as_they_were(found: list[tuple[Token, Trace, bytes]]) -> None:
    asked = [token for token, _, _ in found]
    assert wire.read_inquire([wire.inquire(asked)]) == asked
    known = [(trace, value) for _, trace, value in found]
    assert wire.read_inquired(sent(wire.inquired(known))) == known
    decided = [(token, trace is Trace.APPLIED) for token, trace, _ in found]
    assert wire.read_decide([wire.decide(decided)]) == decided


def test_reads_arrive_as_they_were() -> None:
    rows = np.array([2, 0])
    reads = [(Read(TABLE), 9, 4096), (Read(TABLE, rows), 0, -1)]
    staged = [Token(3, 1), Token(-7)]
    wanted, after = wire.read_pull(sent(wire.pull(reads, staged)))
    assert after == staged
    assert wanted[0] == (5, 9, None, 4096)
    np.testing.assert_array_equal(wanted[1].rows, [2, 0])
    values = [(4, Where.KNOWN, None), (5, Where.HERE, b"x"), (6, Where.LANDED, None)]
    assert wire.read_pulled(sent(wire.pulled(values))) == values


def test_errors_arrive_as_they_were() -> None:
    with pytest.raises(errors.NotFoundError, match="Received: 3"):
        wire.read_outcome(wire.failed(errors.NotFoundError("Received: 3")))
    with pytest.raises(errors.InternalError, match="what"):
        wire.read_outcome([b'\xff{"class":"SystemExit","text":"what"}'])
    assert wire.read_outcome(wire.done(Outcome.REFUSED)) is Outcome.REFUSED
    for nonsense in ([b""], [b"\x09"], []):
        with pytest.raises(ProtocolError):
            wire.read_outcome(nonsense)


@given(st.data())
def test_nonsense_is_a_protocol_error_or_an_answer(data: st.DataObject) -> None:
    """Nothing that an authenticated peer sends raises anything else, and nothing of it is applied."""
    store = Store()
    store.create(TABLE, np.zeros((3, 2), np.dtype("bfloat16")))
    kind = data.draw(st.sampled_from([*Kind, 0, 77]))
    good = sent(wire.push(Kind.PUSH, Token(1), [checked(Update(TABLE, "assign_add", 1.0))]))
    packed = data.draw(st.one_of(st.binary(max_size=40), st.just(good[0][1:])))
    others = data.draw(st.lists(st.binary(max_size=20), max_size=4))
    try:
        answer = perform(store, [bytes([int(kind)]) + packed, *others])
        wire.read_outcome(answer.buffers)
    except errors.PhalanxError:
        pass
    assert store.held(5).value.shape == (3, 2)
    assert not np.asarray(store.held(5).value, np.float32).any() or store.counts["updates"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_bytes_of_arrays(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.dtype(dtype))
    array.setflags(write=False)
    view = view_of(array)
    assert (len(view), bytes(view)) == (array.nbytes, array.tobytes())
