"""Handshakes: peers that do not belong to the job, and bytes in any pieces."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from phalanx import errors
from phalanx.net.framing import ProtocolError
from phalanx.net.handshake import LONGEST_PURPOSE, ClientHandshake, Handshake, ServerHandshake

KEY = b"token"
PURPOSE = {"service": "hub"}
REFUSALS = (ProtocolError, errors.UnauthenticatedError)


def shake_hands(server: ServerHandshake, client: ClientHandshake) -> None:
    for _ in range(2):
        client.receive(server.take())
        server.receive(client.take())


@settings(max_examples=100, deadline=None)
@given(
    purpose=st.dictionaries(st.text(max_size=9), st.integers() | st.text(max_size=9), max_size=3),
    cuts=st.lists(st.integers(1, 90), min_size=1),
    after=st.binary(max_size=50),
)
def test_both_ends_prove_themselves_however_bytes_are_cut(
    purpose: dict[str, Any], cuts: list[int], after: bytes
) -> None:
    server, client = ServerHandshake(KEY), ClientHandshake(KEY, purpose)
    ends: list[tuple[Handshake, Handshake]] = [(server, client), (client, server)]
    sizes, left = itertools.cycle(cuts), {id(server): b"", id(client): b""}
    pipes = {id(server): b"", id(client): b""}
    while not (server.is_done and client.is_done):
        for source, target in ends:
            pipes[id(target)] += source.take() + (after if source.is_done and target is client else b"")
            size = next(sizes)
            piece, pipes[id(target)] = pipes[id(target)][:size], pipes[id(target)][size:]
            left[id(target)] += target.receive(piece)
    assert server.purpose == purpose
    assert server.needs == client.needs == 0
    whole = left[id(client)] + pipes[id(client)]
    assert whole == after * (len(whole) // max(1, len(after))), "what follows is not the handshake's"
    assert left[id(server)] == b""


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.binary(max_size=5000), max_size=8), is_server=st.booleans())
def test_random_bytes_prove_nothing(pieces: list[bytes], is_server: bool) -> None:
    handshake = ServerHandshake(KEY) if is_server else ClientHandshake(KEY, PURPOSE)
    try:
        for piece in pieces:
            assert handshake.receive(piece) == b""
            assert len(handshake._incoming) <= LONGEST_PURPOSE, "little is kept"
    except REFUSALS:
        pass
    assert not handshake.is_done


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 1000), bit=st.integers(0, 7), to_server=st.booleans())
def test_a_bit_that_flips_is_found(at: int, bit: int, to_server: bool) -> None:
    server, client = ServerHandshake(KEY), ClientHandshake(KEY, PURPOSE)

    def flip(data: bytes, doit: bool) -> bytes:
        if not doit:
            return data
        changed = bytearray(data)
        changed[at % len(data)] ^= 1 << bit
        return bytes(changed)

    try:
        client.receive(flip(server.take(), not to_server))
        server.receive(flip(client.take(), to_server))
    except REFUSALS:
        pass
    assert not server.is_done


def test_another_token_is_refused_on_both_sides() -> None:
    server, client = ServerHandshake(KEY), ClientHandshake(b"other", PURPOSE, "hub")
    client.receive(server.take())
    with pytest.raises(errors.UnauthenticatedError):
        server.receive(client.take())
    with pytest.raises(errors.UnauthenticatedError, match="The hub refuses this token"):
        client.receive(server.take())
    assert not server.is_done
    assert not client.is_done


def test_a_server_must_know_the_token_too() -> None:
    server, client = ServerHandshake(KEY), ClientHandshake(KEY, PURPOSE, "hub")
    client.receive(server.take())
    client.take()
    with pytest.raises(errors.UnauthenticatedError, match="The hub does not know the token"):
        client.receive(bytes(32))


def test_a_recorded_proof_does_not_open_another_connection() -> None:
    first, client = ServerHandshake(KEY), ClientHandshake(KEY, PURPOSE)
    client.receive(first.take())
    proof = client.take()
    first.receive(proof)
    assert first.is_done
    second = ServerHandshake(KEY)
    with pytest.raises(errors.UnauthenticatedError):
        second.receive(proof)


def test_a_recorded_server_does_not_pass_for_another() -> None:
    server, client = ServerHandshake(KEY), ClientHandshake(KEY, PURPOSE)
    greeting = server.take()
    client.receive(greeting)
    server.receive(client.take())
    answer = server.take()
    again = ClientHandshake(KEY, PURPOSE)
    again.receive(greeting)
    with pytest.raises(errors.UnauthenticatedError):
        again.receive(answer)


def test_a_proof_cannot_be_given_back() -> None:
    """Who is in between cannot let a process prove itself to itself."""
    server = ServerHandshake(KEY)
    nonce = server.take()[-32:]
    with pytest.raises(errors.UnauthenticatedError):
        server.receive(nonce + bytes(32) + bytes(2))
    client = ClientHandshake(KEY, {})
    client.receive(ServerHandshake(KEY).take())
    proof = client.take()[32:64]
    with pytest.raises(errors.UnauthenticatedError):
        client.receive(proof)


def test_a_proof_is_for_one_purpose() -> None:
    server, client = ServerHandshake(KEY), ClientHandshake(KEY, {"rank": 1})
    client.receive(server.take())
    with pytest.raises(errors.UnauthenticatedError):
        server.receive(client.take().replace(b'"rank": 1', b'"rank": 2'))


def test_a_purpose_that_is_not_served() -> None:
    server = ServerHandshake(KEY, lambda purpose: purpose == {"service": "other"})
    client = ClientHandshake(KEY, PURPOSE, "hub")
    client.receive(server.take())
    with pytest.raises(ProtocolError, match="not served"):
        server.receive(client.take())
    with pytest.raises(ProtocolError, match=r"The hub does not serve \{'service': 'hub'\}"):
        client.receive(server.take())
    assert not server.is_done


def test_a_purpose_is_short() -> None:
    with pytest.raises(errors.InvalidValueError):
        ClientHandshake(KEY, {"x": "x" * LONGEST_PURPOSE})
    server = ServerHandshake(KEY)
    with pytest.raises(ProtocolError, match="too long"):
        server.receive(bytes(64) + (LONGEST_PURPOSE + 1).to_bytes(2, "big"))


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n", b"SSH", b"phalanx-hub 1\n", b"phalanx-net 2\n"]
)
def test_what_is_no_hub_or_one_of_another_version_is_recognised_at_once(said: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a hub of Phalanx, or one of another version"):
        ClientHandshake(KEY, PURPOSE, "hub").receive(said)
