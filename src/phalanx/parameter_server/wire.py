"""Requests to parameter servers, and their answers, as buffers. No sockets in here.

The first buffer is packed: what is asked for, and small numbers. The others are arrays, which are
neither copied nor converted. Logs of servers hold the same buffers.
"""

from __future__ import annotations

import functools
import itertools
import json
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from phalanx import errors
from phalanx.net.framing import Limits, ProtocolError, fields_of
from phalanx.parameter_server.requests import (
    OptimizerDefinition,
    Read,
    Token,
    Update,
    VariableDefinition,
)
from phalanx.parameter_server.store import Outcome, Trace, bytes_of, view_of
from phalanx.parameter_server.updates import CODES, METHODS, dtype_named

__all__ = ["LIMITS", "Kind", "Wanted", "Where", "bytes_of"]

Array = np.ndarray[Any, Any]
Buffers = Sequence[Any]

LIMITS = Limits(fields=0, buffers=1 << 36, most=1 << 16)
"""How large messages may be."""


class Kind(IntEnum):
    """What is asked for. Logs refer to these numbers."""

    HELLO = 1
    CREATE = 2
    OPTIMIZER = 3
    PULL = 4
    APPLY = 5
    PUSH = 6
    STAGE = 7
    COMMIT = 8
    DROP = 9
    INQUIRE = 10
    DECIDE = 11
    FORGET = 12
    STATUS = 13
    SAVE = 14
    END = 15
    PREVIEW = 16
    LANE = 17
    FREE = 18
    FIND = 19
    SEVERAL = 20


_ERROR = 255  # in place of an outcome

_OUTCOMES = {outcome.value: outcome for outcome in Outcome}
_CODES = {outcome: bytes([outcome.value]) for outcome in Outcome}

_KIND = struct.Struct("<B")
_PULL = struct.Struct("<BH")  # kind, how many attempts follow
_WANTED = struct.Struct("<qQBq")  # variable, version that is known, whether rows are named, place
_GIVEN = struct.Struct("<QB")  # version, where the value is
_TOKEN = struct.Struct("<BqI")  # kind, closure, attempt
_UPDATE = struct.Struct("<qBBBq")  # variable, method, whether there are indices, dimensions, optimizer
_ATTEMPT = struct.Struct("<qI")
_COUNT = struct.Struct("<H")
_DECISION = struct.Struct("<qIB")
_TRACE = struct.Struct("<BI")
_NUMBER = struct.Struct("<Bq")
_SAME = 255  # dimensions of an operand that has the shape of its variable


def kind_of(buffers: Buffers) -> int:
    """What a request asks for: a `Kind`, or a number that there is not."""
    try:
        return int(buffers[0][0])
    except IndexError:
        raise ProtocolError("A peer asked a parameter server for nothing.") from None


def array_of(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """An array over bytes that were received, not copied."""
    if not len(buffer):
        return np.empty(shape, dtype)
    try:
        array: Array = np.frombuffer(buffer, dtype)
        return array if array.shape == shape else array.reshape(shape)
    except ValueError as error:
        raise ProtocolError(f"A peer sent an array of another size than it said: {error}") from None


def _indices(buffer: Any) -> Array:
    return array_of(buffer, _INT64, (len(buffer) // 8,))


_INT64 = np.dtype(np.int64)


# -- rare requests are JSON ----------------------------------------------------------------------------


def with_fields(kind: Kind, fields: dict[str, Any], *buffers: Any) -> list[Any]:
    """A request with fields."""
    return [_KIND.pack(kind) + json.dumps(fields).encode(), *buffers]


def fields_in(buffers: Buffers) -> dict[str, Any]:
    """The fields of a request, or of an answer to one."""
    return fields_of(bytes(buffers[0][1:]))


def create(definition: VariableDefinition, value: Array) -> list[Any]:
    """Hold a variable."""
    return with_fields(Kind.CREATE, vars(definition), bytes_of(value))


def read_create(buffers: Buffers) -> tuple[VariableDefinition, Array]:
    """The variable, and its value."""
    definition = read_find(buffers)
    if len(buffers) < 2:
        raise ProtocolError("A peer described a variable without its value.")
    return definition, array_of(buffers[1], np.dtype(definition.dtype), definition.shape)


def read_find(buffers: Buffers) -> VariableDefinition:
    """The variable."""
    fields = fields_in(buffers)
    try:
        fields["shape"] = tuple(int(n) for n in fields["shape"])
        definition = VariableDefinition(**fields)
        np.dtype(definition.dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"A peer described a variable wrongly: {error}") from None
    return definition


def optimizer(definition: OptimizerDefinition) -> list[Any]:
    """Know an optimizer, or another learning rate of it."""
    fields = {"id": definition.id, "rate": definition.rate}
    return with_fields(Kind.OPTIMIZER, fields, definition.transform)


def read_optimizer(buffers: Buffers) -> OptimizerDefinition:
    """The optimizer."""
    try:
        fields = fields_in(buffers)
        given = fields.get("rate")
        rate = None if given is None else (int(given[0]), float(given[1]))
        return OptimizerDefinition(int(fields["id"]), bytes(buffers[1]), rate)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"A peer described an optimizer wrongly: {error}") from None


def find(definition: VariableDefinition) -> list[Any]:
    """Say whether a variable is held; refused if it is not."""
    return with_fields(Kind.FIND, vars(definition))


def free(variables: Sequence[int], optimizers: Sequence[int]) -> list[Any]:
    """Hold variables no more, and forget optimizers."""
    return with_fields(Kind.FREE, {"variables": list(variables), "optimizers": list(optimizers)})


def read_free(buffers: Buffers) -> tuple[list[int], list[int]]:
    """The variables, and the optimizers."""
    fields = fields_in(buffers)
    try:
        variables, optimizers = ([int(n) for n in fields[k]] for k in ("variables", "optimizers"))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"A peer freed variables wrongly: {error}") from None
    return variables, optimizers


# -- several requests in one message, and their answers ------------------------------------------------


def several(requests: Sequence[Buffers]) -> list[Any]:
    """Requests, or answers, as one message: how many buffers each has, and all of these.

    >>> read_several(several([[b"one"], [b"two", b"three"]]))
    [[b'one'], [b'two', b'three']]
    """
    counts = _counts(len(requests)).pack(Kind.SEVERAL, *map(len, requests))
    return [counts, *itertools.chain.from_iterable(requests)]


@functools.lru_cache(maxsize=256)
def _counts(count: int) -> struct.Struct:
    return struct.Struct(f"<B{count}H")


def read_several(buffers: Buffers) -> list[Buffers]:
    """The requests, or answers, of a message."""
    head = buffers[0]
    found, at = [], 1
    if len(head) % _COUNT.size == 1:
        for count in _counts(len(head) // _COUNT.size).unpack(head)[1:]:
            found.append(buffers[at : at + count])
            at += count
    if at != len(buffers) or not all(found):
        raise ProtocolError("A peer sent several requests that do not fit their message.")
    return found


# -- reading -------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """A read, as the server sees it."""

    variable: int
    known: int
    rows: Array | None
    place: int


class Where(IntEnum):
    """Where the value of a variable is that was read."""

    KNOWN = 0  # to the task
    HERE = 1  # in the answer
    LANDED = 2  # where the task wants it


def pull(reads: Sequence[tuple[Read, int, int]], after: Sequence[Token] = ()) -> list[Any]:
    """Read variables, as they are after staged attempts.

    Args:
        reads: each with the version that is known, which is not sent again, and the place in the
            landing where a value can be put, or -1.
        after: attempts of the task itself.
    """
    packed, rows = [_PULL.pack(Kind.PULL, len(after)), *(_ATTEMPT.pack(*t) for t in after)], []
    for (variable, indices), known, place in reads:
        packed.append(_WANTED.pack(variable.id, known, indices is not None, place))
        if indices is not None:
            is_ready = indices.dtype == _INT64 and indices.flags.c_contiguous
            rows.append(view_of(indices if is_ready else np.ascontiguousarray(indices, np.int64)))
    return [b"".join(packed), *rows]


def read_pull(buffers: Buffers) -> tuple[list[Wanted], list[Token]]:
    """What is wanted, and after which attempts."""
    packed, rows = buffers[0], iter(buffers[1:])
    try:
        at = _PULL.size + _PULL.unpack_from(packed)[1] * _ATTEMPT.size
    except struct.error as error:
        raise ProtocolError(f"A peer sent what cannot be read: {error}") from None
    after = [Token(*found) for found in _unpacked(_ATTEMPT, packed[:at], _PULL.size)]
    wanted = [
        Wanted(variable, known, _indices(_next(rows)) if has_rows else None, place)
        for variable, known, has_rows, place in _unpacked(_WANTED, packed, at)
    ]
    return wanted, after


def pulled(values: Sequence[tuple[int, Where, Any]]) -> list[Any]:
    """The answer: versions, where the values are, and the bytes of those that are in it."""
    packed = [b"\x00"]
    packed += [_GIVEN.pack(version, where) for version, where, _ in values]
    return [b"".join(packed), *(value for _, where, value in values if where is Where.HERE)]


def read_pulled(buffers: Buffers) -> list[tuple[int, Where, Any]]:
    """Versions, where the values are, and the bytes of those that are in the answer."""
    values = iter(buffers[1:])
    return [
        (version, Where.HERE, _next(values)) if where == 1 else (version, _place_of(where), None)
        for version, where in _unpacked(_GIVEN, buffers[0], 1)
    ]


def _place_of(number: int) -> Where:
    try:
        return Where(number)
    except ValueError:
        raise ProtocolError(f"A peer sent what cannot be read: {number}") from None


def doubted(tokens: Sequence[Token]) -> list[Any]:
    """The answer in place of values that attempts may have changed in part."""
    return [b"".join([_CODES[Outcome.DOUBTFUL], *(_ATTEMPT.pack(*t) for t in tokens)])]


def read_doubted(buffers: Buffers) -> list[Token]:
    """The attempts that must be settled."""
    return [Token(*found) for found in _unpacked(_ATTEMPT, buffers[0], 1)]


# -- writing -------------------------------------------------------------------------------------------


def push(kind: Kind, token: Token, updates: Sequence[Update], value: bytes = b"") -> list[Any]:
    """Make updates, or stage them. They are as `updates.checked` returns them."""
    packed = [_TOKEN.pack(kind, *token)]
    buffers: list[Any] = [value]
    for variable, method, values, indices, number in updates:
        dims = _SAME if values.shape == variable.shape or indices is not None else values.ndim
        packed.append(_UPDATE.pack(variable.id, CODES[method], indices is not None, dims, number))
        if dims != _SAME:
            packed.append(struct.pack(f"<{dims}Q", *values.shape))
        buffers.append(view_of(values))
        if indices is not None:
            buffers.append(view_of(indices))
    return [b"".join(packed), *buffers]


def read_push(
    buffers: Buffers, definition_of: Callable[[int], VariableDefinition]
) -> tuple[Token, list[Update], bytes]:
    """The attempt, its updates, and what the closure returned."""
    packed, arrays, updates = buffers[0], iter(buffers[2:]), []
    try:
        _, closure, attempt = _TOKEN.unpack_from(packed)
        at = _TOKEN.size
        while at < len(packed):
            variable, method, has_indices, dims, number = _UPDATE.unpack_from(packed, at)
            at += _UPDATE.size
            definition = definition_of(variable)
            shape = definition.shape
            if dims != _SAME:
                shape = struct.unpack_from(f"<{dims}Q", packed, at)
                at += 8 * dims
            values, indices = _next(arrays), None
            if has_indices:
                indices = _indices(_next(arrays))
                shape = (len(indices), *shape[1:])
            array = array_of(values, dtype_named(definition.dtype), shape)
            updates.append(Update(definition, METHODS[method], array, indices, number))
        return Token(closure, attempt), updates, bytes(buffers[1])
    except (struct.error, ValueError, IndexError) as error:
        raise ProtocolError(f"A peer sent updates that cannot be read: {error}") from None


def token_of(buffers: Buffers) -> Token:
    """The attempt of a request that was performed."""
    return Token(*_TOKEN.unpack_from(buffers[0])[1:])


def about(kind: Kind, token: Token) -> bytes:
    """Commit or drop what was staged."""
    return _TOKEN.pack(kind, *token)


def read_token(buffers: Buffers) -> Token:
    """The attempt that a request is about."""
    try:
        return Token(*_TOKEN.unpack(buffers[0])[1:])
    except struct.error as error:
        raise ProtocolError(f"A peer sent a token that cannot be read: {error}") from None


def number(kind: Kind, value: int) -> bytes:
    """A request with one number."""
    return _NUMBER.pack(kind, value)


def read_number(buffers: Buffers) -> int:
    """The number of a request."""
    try:
        return int(_NUMBER.unpack(buffers[0])[1])
    except struct.error as error:
        raise ProtocolError(f"A peer sent a number that cannot be read: {error}") from None


# -- recovery ------------------------------------------------------------------------------------------


def inquire(tokens: Sequence[Token]) -> bytes:
    """Fence attempts off, and tell what is known of them."""
    return b"".join([_KIND.pack(Kind.INQUIRE), *(_ATTEMPT.pack(*t) for t in tokens)])


def read_inquire(buffers: Buffers) -> list[Token]:
    """The attempts."""
    return [Token(*found) for found in _unpacked(_ATTEMPT, buffers[0], 1)]


def inquired(found: Sequence[tuple[Trace, bytes]]) -> list[Any]:
    """The answer to an inquiry."""
    packed = [b"\x00", *(_TRACE.pack(trace.value, len(value)) for trace, value in found)]
    return [b"".join(packed), b"".join(value for _, value in found)]


def read_inquired(buffers: Buffers) -> list[tuple[Trace, bytes]]:
    """What is known of the attempts."""
    found, at = [], 0
    for trace, size in _unpacked(_TRACE, buffers[0], 1):
        found.append((Trace(trace), bytes(buffers[1][at : at + size])))
        at += size
    return found


def decide(decisions: Sequence[tuple[Token, bool]]) -> bytes:
    """Make or drop what attempts have staged."""
    packed = (_DECISION.pack(*token, is_commit) for token, is_commit in decisions)
    return b"".join([_KIND.pack(Kind.DECIDE), *packed])


def read_decide(buffers: Buffers) -> list[tuple[Token, bool]]:
    """The decisions."""
    return [(Token(c, a), bool(is_commit)) for c, a, is_commit in _unpacked(_DECISION, buffers[0], 1)]


# -- answers -------------------------------------------------------------------------------------------


def done(outcome: Outcome) -> list[Any]:
    """The answer to a request that changes something."""
    return [_CODES[outcome]]


def told(fields: dict[str, Any]) -> list[Any]:
    """An answer with fields."""
    return [b"\x00" + json.dumps(fields).encode()]


def failed(error: errors.PhalanxError) -> list[Any]:
    """The answer to a request that makes no sense."""
    fields = {"class": type(error).__name__, "text": str(error)}
    return [_KIND.pack(_ERROR) + json.dumps(fields).encode()]


def read_outcome(buffers: Buffers) -> Outcome:
    """What a server did; its error is raised here."""
    code = buffers[0][0] if buffers and len(buffers[0]) else -1
    outcome = _OUTCOMES.get(code)
    if outcome is not None:
        return outcome
    if code != _ERROR:
        raise ProtocolError("A parameter server sent an answer that cannot be read.")
    fields = fields_in(buffers)
    kind = getattr(errors, str(fields.get("class")), None)
    if not (isinstance(kind, type) and issubclass(kind, errors.PhalanxError)):
        kind = errors.InternalError
    raise kind(str(fields.get("text")))


def _unpacked(record: struct.Struct, packed: Any, start: int) -> Any:
    try:
        return record.iter_unpack(packed[start:])
    except struct.error as error:
        raise ProtocolError(f"A peer sent what cannot be read: {error}") from None


def _next(buffers: Any) -> Any:
    try:
        return next(buffers)
    except StopIteration:
        raise ProtocolError("A peer sent fewer arrays than it said.") from None
