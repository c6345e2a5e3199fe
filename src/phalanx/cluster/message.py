"""Objects that are used as protobuf's messages are, without protobuf.

A message has fields, each of one `FieldKind`. Every field always has a value; the default value is the
same as none. Fields that are messages themselves are copied when they are assigned.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from phalanx.cluster.tasks import text
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime import protobuf_wire as wire
from phalanx.runtime.formatting import shown

__all__ = ["FieldKind", "Int", "Opaque", "ProtobufMessage", "Text", "block", "quoted", "read_fields"]

# ruff: noqa: N802  - the methods of messages have protobuf's names


class _UnknownFieldError(InvalidTypeError, InvalidValueError, AttributeError):
    """A message has no field of that name."""


class FieldKind(abc.ABC):
    """What the value of a field can be, and how it is written; `number` is that of the field."""

    def __init__(self, number: int) -> None:
        self.number = number

    @abc.abstractmethod
    def default(self) -> Any:
        """A new default value."""

    @abc.abstractmethod
    def check(self, value: Any, what: str) -> Any:
        """The value to keep; an error that begins with `what` if it cannot be one."""

    def merged(self, old: Any, new: Any) -> Any:
        """What a field that held `old` holds after `new` was merged into it."""
        return old if new == self.default() else new

    @abc.abstractmethod
    def encoded(self, value: Any) -> bytes:
        """The value as fields on the wire."""

    def decoded(self, raw: int | bytes) -> Any:
        """The value of one field on the wire, for `check`."""
        return raw

    @abc.abstractmethod
    def lines(self, name: str, value: Any) -> list[str]:
        """The value in protobuf's text format."""


class Text(FieldKind):
    """A string."""

    def default(self) -> str:
        """The empty string."""
        return ""

    def check(self, value: Any, what: str) -> str:
        """Takes strings, and bytes as UTF-8."""
        return text(value, what)

    def encoded(self, value: str) -> bytes:
        """UTF-8."""
        return wire.bytes_field(self.number, value.encode()) if value else b""

    def lines(self, name: str, value: str) -> list[str]:
        """A quoted string."""
        return [f"{name}: {quoted(value)}"] if value else []


class Int(FieldKind):
    """A signed number of 32 bits."""

    def default(self) -> int:
        """Zero."""
        return 0

    def check(self, value: Any, what: str) -> int:
        """Takes whole numbers."""
        problem = f"{what} must be a whole number of 32 bits. Received: {shown(value)}"
        try:
            number = operator.index(value)
        except TypeError as error:
            raise InvalidTypeError(problem) from error
        if number != wire.int32(number):
            raise InvalidValueError(problem)
        return number

    def encoded(self, value: int) -> bytes:
        """A number on the wire."""
        return wire.int_field(self.number, value) if value else b""

    def decoded(self, raw: int | bytes) -> Any:
        """Negative numbers come as large ones."""
        return wire.int32(raw) if isinstance(raw, int) else raw

    def lines(self, name: str, value: int) -> list[str]:
        """The digits."""
        return [f"{name}: {value}"] if value else []


class Opaque(FieldKind):
    """A message that nothing here reads: None, an object with `SerializeToString`, or such bytes."""

    def default(self) -> None:
        """None."""

    def check(self, value: Any, what: str) -> Any:
        """Takes what can be serialized."""
        if value is None or isinstance(value, bytes) or hasattr(value, "SerializeToString"):
            return value
        raise InvalidTypeError(
            f"{what} must be None, a message or a serialized message. Received: {shown(value)}"
        )

    def encoded(self, value: Any) -> bytes:
        """The serialized message."""
        if value is None:
            return b""
        data = value if isinstance(value, bytes) else value.SerializeToString()
        return wire.bytes_field(self.number, data)

    def lines(self, name: str, value: Any) -> list[str]:
        """The message's own text, or the number of bytes."""
        if value is None:
            return []
        inner = f"# {len(value)} bytes" if isinstance(value, bytes) else str(value).rstrip("\n")
        return block(name, inner.split("\n"))


class ProtobufMessage:
    """Fields with protobuf's names and rules; subclasses list them in `_FIELDS`, by number."""

    _FIELDS: ClassVar[Mapping[str, FieldKind]] = {}

    def _fill(self, **values: Any) -> None:
        for name, kind in self._FIELDS.items():
            value = values[name]
            setattr(self, name, kind.default() if value is None else value)

    def __setattr__(self, name: str, value: Any) -> None:
        kept = self._kind(name).check(value, f"`{name}` of a {type(self).__name__}")
        object.__setattr__(self, name, kept)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(
            getattr(self, name) == getattr(other, name) for name in self._FIELDS
        )

    # Messages change.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = (
            f"{name}={getattr(self, name)!r}"
            for name, kind in self._FIELDS.items()
            if getattr(self, name) != kind.default()
        )
        return f"{type(self).__name__}({', '.join(fields)})"

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def SerializeToString(self, deterministic: bool | None = None) -> bytes:
        """Returns the message as bytes, in protobuf's format. The same message gives the same bytes."""
        return b"".join(kind.encoded(getattr(self, name)) for name, kind in self._FIELDS.items())

    @classmethod
    def FromString(cls, serialized: bytes) -> Self:
        """Returns the message that `SerializeToString` wrote. Unknown fields are left out."""
        message = cls()
        message.MergeFromString(serialized)
        return message

    def ParseFromString(self, serialized: bytes) -> int:
        """Becomes the message that was serialized, and returns the number of bytes."""
        self.CopyFrom(self.FromString(serialized))
        return len(serialized)

    def MergeFromString(self, serialized: bytes) -> int:
        """Merges a serialized message into this one, and returns the number of bytes."""
        if not isinstance(serialized, bytes | bytearray | memoryview):
            raise InvalidTypeError(f"A serialized message must be bytes. Received: {shown(serialized)}")
        names = {kind.number: (name, kind) for name, kind in self._FIELDS.items()}
        changed = {name: getattr(self, name) for name in self._FIELDS}
        for number, raw in read_fields(bytes(serialized)):
            if number in names:
                name, kind = names[number]
                new = kind.check(kind.decoded(raw), f"`{name}` of a serialized {type(self).__name__}")
                changed[name] = kind.merged(changed[name], new)
        for name, value in changed.items():
            setattr(self, name, value)
        return len(serialized)

    def MergeFrom(self, other: Self) -> None:
        """Takes over the fields that are set in another message of the same class.

        Tasks and jobs are added to those that are there.
        """
        self._check_class(other)
        for name, kind in self._FIELDS.items():
            setattr(self, name, kind.merged(getattr(self, name), getattr(other, name)))

    def CopyFrom(self, other: Self) -> None:
        """Becomes equal to another message of the same class."""
        self._check_class(other)
        for name in self._FIELDS:
            setattr(self, name, getattr(other, name))

    def Clear(self) -> None:
        """Sets all fields to their defaults."""
        for name in self._FIELDS:
            self.ClearField(name)

    def ClearField(self, field_name: str) -> None:
        """Sets one field to its default."""
        setattr(self, field_name, self._kind(field_name).default())

    def HasField(self, field_name: str) -> bool:
        """Whether a field has a value other than its default."""
        kind = self._kind(field_name)
        return bool(getattr(self, field_name) != kind.default())

    def _lines(self) -> list[str]:
        return [
            line
            for name, kind in self._FIELDS.items()
            for line in kind.lines(name, getattr(self, name))
        ]

    def _kind(self, name: str) -> FieldKind:
        if not isinstance(name, str) or name not in self._FIELDS:
            raise _UnknownFieldError(
                f"A {type(self).__name__} has the fields {list(self._FIELDS)}. Received: {shown(name)}"
            )
        return self._FIELDS[name]

    def _check_class(self, other: object) -> None:
        if type(other) is not type(self):
            raise InvalidTypeError(f"A {type(self).__name__} is needed. Received: {shown(other)}")


def read_fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """The fields of a serialized message, by number."""
    try:
        return wire.values(data)
    except wire.Malformed:
        raise InvalidValueError(
            "The bytes are not a serialized message. Use what `SerializeToString` returned. "
            f"Received: {len(data)} bytes, {shown(data[:40])}"
        ) from None


def block(name: str, lines: list[str]) -> list[str]:
    """A message inside another, in protobuf's text format."""
    return [f"{name} {{", *(f"  {line}" for line in lines), "}"]


def quoted(value: str) -> str:
    r"""A string in protobuf's text format.

    >>> print(quoted('a "b"'))
    "a \"b\""
    """
    named = {'"': '\\"', "'": "\\'", "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    written = (
        named.get(char) or (char if char >= " " and char != "\x7f" else f"\\{ord(char):03o}")
        for char in value
    )
    return '"' + "".join(written) + '"'
