"""How both ends of a connection prove that they know the job's token. No sockets in here.

The server begins with a greeting, which has the version of the protocol, and a random number. The
client answers with a random number, its proof, and what the connection is for. The server answers with
its own proof. A proof is a keyed hash (HMAC with SHA-256) of the side that makes it, the greeting, both
numbers and the purpose, so none can be used again, given back or used for something else.

Before the proofs only these bytes are read, at most a few thousand, and none are looked into.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.errors import InvalidValueError, UnauthenticatedError
from phalanx.net.framing import ProtocolError, fields_of
from phalanx.runtime.formatting import shown

LONGEST_PURPOSE = 4096
"""Bytes of what a connection is for, as JSON."""

_GREETING = b"phalanx-net 1\n"
_NONCE = 32
_PROOF = hashlib.sha256().digest_size
_LENGTH = 2
_WRONG_TOKEN = b"phalanx: this token is not right"  # as long as a proof, in its place
_NOT_SERVED = b"phalanx: this is not served here"
assert len(_WRONG_TOKEN) == len(_NOT_SERVED) == _PROOF


class Handshake(ABC):
    """One end of a handshake: bytes in, bytes out.

    `receive` takes bytes of the peer, and `take` gives what is to be sent to it. Anything wrong raises
    `ProtocolError`, or `UnauthenticatedError` for a peer with another token; the connection must then
    be closed, once what is left to `take` was sent.

    >>> server, client = ServerHandshake(b"key"), ClientHandshake(b"key", {"rank": 1})
    >>> while not (server.is_done and client.is_done):
    ...     _ = client.receive(server.take())
    ...     _ = server.receive(client.take())
    >>> server.purpose
    {'rank': 1}
    """

    def __init__(self, key: bytes, wanted: int) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE)
        self._incoming = bytearray()
        self._outgoing = b""
        self._wanted = wanted
        self.is_done = False
        """Whether both ends have proved themselves."""

    @property
    def needs(self) -> int:
        """How many bytes of the peer come next; what follows the handshake is not among them."""
        return 0 if self.is_done else self._wanted - len(self._incoming)

    def receive(self, data: bytes) -> bytes:
        """Take bytes of the peer; returns those that follow the handshake."""
        while not self.is_done and data:
            count = self.needs
            self._incoming += data[:count]
            data = data[count:]
            self._look()
            if len(self._incoming) == self._wanted:
                part = bytes(self._incoming)
                self._incoming.clear()
                self._go_on(part)
        return data

    def take(self) -> bytes:
        """Remove and return the bytes to send."""
        data, self._outgoing = self._outgoing, b""
        return data

    def _look(self) -> None:  # noqa: B027 - most have nothing to look at
        """Look at a part that is not complete."""

    @abstractmethod
    def _go_on(self, part: bytes) -> None:
        """Use a part that is complete, and want the next."""

    def _proof(self, side: bytes, server: bytes, client: bytes, purpose: bytes) -> bytes:
        text = side + _GREETING + server + client + purpose
        return hmac.new(self._key, text, hashlib.sha256).digest()


class ServerHandshake(Handshake):
    """The end that listens.

    Args:
        key: the secret.
        accepts: whether connections for a purpose are served here; the default is all.

    Attributes:
        purpose: what the connection is for, when the handshake is done.
    """

    def __init__(self, key: bytes, accepts: Callable[[dict[str, Any]], bool] | None = None) -> None:
        super().__init__(key, _NONCE + _PROOF + _LENGTH)
        self._accepts = accepts
        self._answer = b""  # the first part of the client's answer
        self.purpose: dict[str, Any] = {}
        self._outgoing = _GREETING + self._nonce

    def _go_on(self, part: bytes) -> None:
        if not self._answer:
            length = int.from_bytes(part[-_LENGTH:], "big")
            if length > LONGEST_PURPOSE:
                raise ProtocolError(f"A peer announced a purpose of {length} bytes, which is too long.")
            self._answer, self._wanted = part, length
            if length:
                return
            part = b""
        nonce, proof = self._answer[:_NONCE], self._answer[_NONCE : _NONCE + _PROOF]
        if not hmac.compare_digest(proof, self._proof(b"client", self._nonce, nonce, part)):
            self._outgoing = _WRONG_TOKEN
            raise UnauthenticatedError("A peer does not know the job's token.")
        self.purpose = fields_of(part) if part else {}
        if self._accepts is not None and not self._accepts(self.purpose):
            self._outgoing = _NOT_SERVED
            raise ProtocolError(f"A peer wants what is not served here: {shown(self.purpose)}")
        self._outgoing = self._proof(b"server", self._nonce, nonce, part)
        self.is_done = True


class ClientHandshake(Handshake):
    """The end that connects."""

    def __init__(self, key: bytes, purpose: Mapping[str, Any], peer: str = "server") -> None:
        super().__init__(key, len(_GREETING) + _NONCE)
        self._shown, self._peer = shown(purpose), peer
        self._purpose = json.dumps(purpose, allow_nan=False).encode() if purpose else b""
        if len(self._purpose) > LONGEST_PURPOSE:
            raise InvalidValueError(
                f"A purpose must be at most {LONGEST_PURPOSE} bytes. Received: {self._shown}"
            )
        self._expected = b""  # the server's proof

    def _look(self) -> None:
        start = bytes(self._incoming[: len(_GREETING)])
        if not self._expected and not _GREETING.startswith(start):
            raise ProtocolError(
                f"What listens there is not a {self._peer} of Phalanx, or one of another version. "
                f"Received: {shown(start)}"
            )

    def _go_on(self, part: bytes) -> None:
        if not self._expected:
            about = part[len(_GREETING) :], self._nonce, self._purpose
            self._expected, self._wanted = self._proof(b"server", *about), _PROOF
            length = len(self._purpose).to_bytes(_LENGTH, "big")
            self._outgoing = self._nonce + self._proof(b"client", *about) + length + self._purpose
        elif hmac.compare_digest(part, self._expected):
            self.is_done = True
        elif part == _NOT_SERVED:
            raise ProtocolError(f"The {self._peer} does not serve {self._shown}.")
        else:
            how = "refuses this token" if part == _WRONG_TOKEN else "does not know the token"
            raise UnauthenticatedError(
                f"The {self._peer} {how}. All processes of a job need the same PHALANX_TOKEN, a text "
                "that only they know."
            )
