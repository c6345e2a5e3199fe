"""Objects that are used as protobuf's messages are, without protobuf.

A message has fields, each of one `FieldKind`. Every field always has a value; the default value is the
same as none. Fields that are messages themselves are copied when they are assigned.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from phalanx.cluster.tasks import text
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime import protobuf_wire as wire
from phalanx.runtime.formatting import shown

# ruff: noqa: N802  - the methods of messages have protobuf's names


class _UnknownFieldError(InvalidTypeError, InvalidValueError, AttributeError):
    """A message has no field of that name."""


@dataclass(frozen=True)
class FieldKind:
    """What the value of a field can be, and how it is written."""

    number: int
    default: Callable[[], Any]  # makes a default value
    check: Callable[[Any, str], Any]  # gives the value to keep; its errors begin with the text
    raw: Callable[[Any], Sequence[int | bytes]]  # none, one or several numbers or bytes on the wire
    texts: Callable[[Any], Sequence[str | list[str]]]  # the same as text, messages as lists of lines
    decoded: Callable[[int | bytes], Any] = lambda raw: raw  # what `check` takes, from the wire
    merged: Callable[[Any, Any], Any] = lambda old, new: new or old

    def encoded(self, value: Any) -> bytes:
        """The value as fields on the wire."""
        return b"".join(
            wire.int_field(self.number, raw)
            if isinstance(raw, int)
            else wire.bytes_field(self.number, raw)
            for raw in self.raw(value)
        )

    def lines(self, name: str, value: Any) -> list[str]:
        """The value as lines of protobuf's text format."""
        texts = (
            [f"{name}: {text}"]
            if isinstance(text, str)
            else [f"{name} {{", *(f"  {line}" for line in text), "}"]
            for text in self.texts(value)
        )
        return [line for text in texts for line in text]


def text_field(number: int) -> FieldKind:
    """A string; bytes are taken as UTF-8."""
    return FieldKind(
        number,
        str,
        text,
        lambda value: [value.encode()] if value else [],
        lambda value: [quoted(value)] if value else [],
    )


def int_field(number: int) -> FieldKind:
    """A signed number of 32 bits."""

    def check(value: Any, what: str) -> int:
        problem = f"{what} must be a whole number of 32 bits. Received: {shown(value)}"
        try:
            number = operator.index(value)
        except TypeError as error:
            raise InvalidTypeError(problem) from error
        if number != wire.int32(number):
            raise InvalidValueError(problem)
        return number

    return FieldKind(
        number,
        int,
        check,
        lambda value: [value] if value else [],
        lambda value: [str(value)] if value else [],
        # Negative numbers come as large ones.
        decoded=lambda raw: wire.int32(raw) if isinstance(raw, int) else raw,
    )


def opaque_field(number: int) -> FieldKind:
    """A message that nothing here reads: None, an object with `SerializeToString`, or such bytes."""

    def check(value: Any, what: str) -> Any:
        if value is None or isinstance(value, bytes) or hasattr(value, "SerializeToString"):
            return value
        raise InvalidTypeError(
            f"{what} must be None, a message or a serialized message. Received: {shown(value)}"
        )

    def raw(value: Any) -> list[bytes]:
        if value is None:
            return []
        return [value if isinstance(value, bytes) else value.SerializeToString()]

    def texts(value: Any) -> list[list[str]]:
        if value is None:
            return []
        inner = f"# {len(value)} bytes" if isinstance(value, bytes) else str(value).rstrip("\n")
        return [inner.split("\n")]

    return FieldKind(
        number, lambda: None, check, raw, texts, merged=lambda old, new: old if new is None else new
    )


class ProtobufMessage:
    """Fields with protobuf's names and rules; subclasses list them in `_FIELDS`, by number."""

    _FIELDS: ClassVar[Mapping[str, FieldKind]] = {}
    _HINT = ""  # how to get such a message

    @classmethod
    def copy_of(cls, value: object, what: str) -> Self:
        """A copy of a message, or a message with the fields that a dict has."""
        own = cls()
        if isinstance(value, cls):
            own.CopyFrom(value)
        elif isinstance(value, Mapping):
            for name, field in value.items():
                setattr(own, name, field)
        else:
            raise InvalidTypeError(
                f"{what} must be a {cls.__name__}{cls._HINT}. Received: {shown(value)}"
            )
        return own

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
        return "".join(f"{line}\n" for line in self.lines())

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

    def lines(self) -> list[str]:
        """The lines of `str`."""
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
