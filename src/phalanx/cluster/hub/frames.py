"""Messages as bytes, and the proof that a peer belongs to the job. No sockets in here.

A connection begins with a challenge in both directions: each side sends a random number, and shows by a
keyed hash of both numbers that it knows the job's token. Nothing else is read before that. Then
messages follow: four bytes of length and a JSON object.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import InvalidValueError, UnauthenticatedError, UnavailableError
from phalanx.core.showing import shown

__all__ = ["LONGEST_MESSAGE", "ProtocolError", "Stream", "encode"]

LONGEST_MESSAGE = 8 * 1024 * 1024
_GREETING = b"phalanx-hub 1\n"
_NONCE = 32
_LONGEST_NUMBER = 100  # digits; then it can still become a number with a fraction
_PROOF = hashlib.sha256().digest_size
_REFUSAL = b"phalanx-hub: this token is wrong"  # as long as a proof, in its place
assert len(_REFUSAL) == _PROOF


class ProtocolError(UnavailableError):
    """What came over a connection is not what a member of the job would send."""


def encode(message: Mapping[str, Any]) -> bytes:
    r"""A message as bytes; too long a message is an error.

    >>> encode({"type": "leave"})
    b'\x00\x00\x00\x10{"type":"leave"}'
    """
    try:
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(
            "Values that workers exchange must be small and plain: finite numbers, texts, lists and "
            f"dicts, as JSON has them. Received: {shown(message)}"
        ) from error
    if len(body) > LONGEST_MESSAGE:
        raise InvalidValueError(
            f"Values that workers exchange must be small, at most {LONGEST_MESSAGE} bytes. "
            f"Received: {len(body)} bytes"
        )
    return len(body).to_bytes(4, "big") + body


class Stream:
    """One end of a connection: bytes in, messages out.

    `receive` takes bytes from the peer and returns the messages that they complete; `outgoing` holds
    the bytes to send. Messages that are sent before the peer is known wait until it is. Anything wrong
    raises `ProtocolError`, or `UnauthenticatedError` for a peer with another token; the connection must
    then be closed.

    >>> hub, member = Stream("token", server=True), Stream("token", server=False)
    >>> member.send({"type": "leave"})
    >>> for _ in range(2):
    ...     assert member.receive(hub.take()) == []
    ...     print(hub.receive(member.take()), hub.proven, member.proven)
    [] True False
    [{'type': 'leave'}] True True
    """

    def __init__(self, token: str, *, server: bool) -> None:
        self._key = token.encode()
        self._server = server
        self._nonce = secrets.token_bytes(_NONCE)
        self._incoming = bytearray()
        self._waiting = bytearray()
        self._expects_greeting = not server
        self.outgoing = bytearray(_GREETING + self._nonce if server else b"")
        self.proven = False
        self._client_nonce = b""
        self._server_nonce = self._nonce if server else b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message."""
        (self.outgoing if self.proven else self._waiting).extend(encode(message))

    def take(self) -> bytes:
        """Remove and return all bytes that wait to be sent."""
        data = bytes(self.outgoing)
        self.outgoing.clear()
        return data

    def receive(self, data: bytes) -> list[dict[str, Any]]:
        """Take bytes from the peer; returns the messages that are now complete."""
        self._incoming += data
        if not self.proven and not self._prove():
            return []
        messages = []
        while len(self._incoming) >= 4:
            length = int.from_bytes(self._incoming[:4], "big")
            if length > LONGEST_MESSAGE:
                raise ProtocolError(f"A peer announced a message of {length} bytes, which is too long.")
            if len(self._incoming) < 4 + length:
                break
            messages.append(_decode(bytes(self._incoming[4 : 4 + length])))
            del self._incoming[: 4 + length]
        return messages

    def _prove(self) -> bool:
        return self._prove_to_client() if self._server else self._prove_to_server()

    def _prove_to_client(self) -> bool:
        if len(self._incoming) < _NONCE + _PROOF:
            return False
        self._client_nonce, proof = self._cut(_NONCE), self._cut(_PROOF)
        if not hmac.compare_digest(proof, self._proof(b"member")):
            self.outgoing += _REFUSAL
            raise UnauthenticatedError("A peer does not know the job's token.")
        self._finish(self._proof(b"hub"))
        return True

    def _prove_to_server(self) -> bool:
        if self._expects_greeting:
            start = bytes(self._incoming[: len(_GREETING)])
            if not _GREETING.startswith(start):
                raise ProtocolError(
                    "What listens there is not a hub of Phalanx, or one of another version. "
                    f"Received: {shown(start)}"
                )
            if len(self._incoming) < len(_GREETING) + _NONCE:
                return False
            self._cut(len(_GREETING))
            self._server_nonce, self._client_nonce = self._cut(_NONCE), self._nonce
            self._expects_greeting = False
            self.outgoing += self._nonce + self._proof(b"member")
        if len(self._incoming) < _PROOF:
            return False
        proof = self._cut(_PROOF)
        if not hmac.compare_digest(proof, self._proof(b"hub")):
            who = (
                "The hub refuses this token" if proof == _REFUSAL else "The hub does not know the token"
            )
            raise UnauthenticatedError(
                f"{who}. All processes of a job need the same PHALANX_TOKEN, a text that nobody else "
                "knows."
            )
        self._finish(b"")
        return True

    def _finish(self, answer: bytes) -> None:
        self.outgoing += answer + self._waiting
        self._waiting.clear()
        self.proven = True

    def _cut(self, length: int) -> bytes:
        piece = bytes(self._incoming[:length])
        del self._incoming[:length]
        return piece

    def _proof(self, side: bytes) -> bytes:
        text = side + self._server_nonce + self._client_nonce
        return hmac.new(self._key, text, hashlib.sha256).digest()


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"A peer sent a message that is no JSON: {body[:80]!r}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"A peer sent a message that is no JSON object: {body[:80]!r}")
    return message


def _whole(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number that is not finite: {text:.40}")
    return number
