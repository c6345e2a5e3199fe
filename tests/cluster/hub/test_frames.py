"""Messages as bytes: any bytes in any pieces, and peers that do not belong to the job."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cluster.hub.frames import LONGEST_MESSAGE, ProtocolError, Stream, encode
from phalanx.core import errors

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
messages = st.lists(st.dictionaries(st.text(max_size=5), values, max_size=3), max_size=4)


def shake_hands(hub, member):
    for _ in range(3):
        member.receive(hub.take())
        hub.receive(member.take())


@settings(max_examples=50, deadline=None)
@given(
    to_hub=messages,
    to_member=messages,
    cuts=st.lists(st.integers(1, 90), min_size=1),
    first=st.booleans(),
)
def test_messages_arrive_whole_and_in_order_however_they_are_cut(to_hub, to_member, cuts, first):
    hub, member = Stream("token", server=True), Stream("token", server=False)
    for message in to_hub:
        member.send(message)
    for message in to_member:
        hub.send(message)
    pipes = {"hub": bytearray(), "member": bytearray()}
    got = {"hub": [], "member": []}
    ends = {"hub": hub, "member": member}
    sizes = itertools.cycle(cuts)
    while True:
        pipes["hub"] += member.take()
        pipes["member"] += hub.take()
        ready = [name for name, pipe in pipes.items() if pipe]
        if not ready:
            break
        name = ready[0 if first else -1]
        size = next(sizes)
        piece = bytes(pipes[name][:size])
        del pipes[name][:size]
        got[name] += ends[name].receive(piece)
    assert hub.proven
    assert member.proven
    assert got == {"hub": to_hub, "member": to_member}


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.binary(max_size=200), max_size=8), server=st.booleans())
def test_random_bytes_prove_nothing(pieces, server):
    stream = Stream("token", server=server)
    try:
        for piece in pieces:
            assert stream.receive(piece) == []
    except (ProtocolError, errors.UnauthenticatedError):
        pass
    assert not stream.proven


@settings(max_examples=100, deadline=None)
@given(junk=st.binary(min_size=1, max_size=300))
def test_random_bytes_after_the_proof_are_refused_or_incomplete(junk):
    hub, member = Stream("token", server=True), Stream("token", server=False)
    shake_hands(hub, member)
    assert hub.proven
    with contextlib.suppress(ProtocolError):
        assert all(isinstance(message, dict) for message in hub.receive(junk))


def test_another_token_is_refused_on_both_sides():
    hub, member = Stream("token", server=True), Stream("other", server=False)
    member.receive(hub.take())
    with pytest.raises(errors.UnauthenticatedError):
        hub.receive(member.take())
    with pytest.raises(errors.UnauthenticatedError, match="The hub refuses this token"):
        member.receive(hub.take())
    assert not hub.proven
    assert not member.proven


def test_a_hub_must_know_the_token_too():
    hub, member = Stream("token", server=True), Stream("token", server=False)
    member.receive(hub.take())
    member.take()
    with pytest.raises(errors.UnauthenticatedError, match="The hub does not know the token"):
        member.receive(bytes(32))


def test_a_recorded_proof_does_not_open_another_connection():
    first, member = Stream("token", server=True), Stream("token", server=False)
    member.receive(first.take())
    proof = member.take()
    first.receive(proof)
    assert first.proven
    second = Stream("token", server=True)
    second.take()
    with pytest.raises(errors.UnauthenticatedError):
        second.receive(proof)


def test_what_is_no_hub_is_recognised():
    with pytest.raises(ProtocolError, match="not a hub of Phalanx"):
        Stream("token", server=False).receive(b"HTTP/1.1 400 Bad Request\r\n")


def test_nothing_is_kept_of_a_message_that_is_too_long():
    hub, member = Stream("token", server=True), Stream("token", server=False)
    shake_hands(hub, member)
    with pytest.raises(ProtocolError, match="too long"):
        hub.receive((LONGEST_MESSAGE + 1).to_bytes(4, "big"))


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff", b"[" * 100_000, b"3"])
def test_only_json_objects_are_messages(body):
    hub, member = Stream("token", server=True), Stream("token", server=False)
    shake_hands(hub, member)
    with pytest.raises(ProtocolError):
        hub.receive(len(body).to_bytes(4, "big") + body)


def test_what_cannot_be_sent():
    with pytest.raises(errors.InvalidValueError, match="small and plain"):
        encode({"value": object()})
    with pytest.raises(errors.InvalidValueError, match="at most"):
        encode({"value": "x" * LONGEST_MESSAGE})
    assert json.loads(encode({"value": "ü"})[4:]) == {"value": "ü"}
