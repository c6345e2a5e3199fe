"""Messages as bytes: any bytes in any pieces, and sizes that are too large."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable

import pytest
from hypothesis import given, settings, strategies as st

from phalanx import errors
from phalanx.net.framing import Decoder, Limits, Message, ProtocolError, SendQueue, encode

LIMITS = Limits(fields=1 << 20, buffers=1 << 20, most=8)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**98), 10**98)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
buffers = st.binary(max_size=100) | st.sampled_from([bytes(5000), b"x" * 40_000])
messages = st.builds(
    Message,
    st.dictionaries(st.text(max_size=5), values, max_size=3),
    st.lists(buffers, max_size=3),
    st.integers(0, 2**32 - 1),
)


def feed(decoder: Decoder, data: bytes, cuts: Iterable[int] = (1 << 20,)) -> list[Message]:
    """The messages that bytes in pieces of these sizes complete."""
    found, sizes = [], itertools.cycle(cuts)
    while data:
        room = decoder.buffer()
        count = min(len(room), len(data), next(sizes))
        assert count, "there is always room"
        room[:count] = data[:count]
        decoder.received(count)
        data = data[count:]
        while (message := decoder.next()) is not None:
            found.append(message)
    return found


def plain(message: Message) -> tuple[object, list[bytes], int]:
    return message.fields, [bytes(b) for b in message.buffers], message.number


def joined(*many: Message, limits: Limits = LIMITS) -> bytes:
    return b"".join(bytes(piece) for message in many for piece in encode(message, limits))


def head(fields: int, *sizes: int, count: int | None = None, mark: bytes = b"plx2") -> bytes:
    count = len(sizes) if count is None else count
    return struct.pack(f"!4sIII{len(sizes)}Q", mark, 0, fields, count, *sizes)


@settings(max_examples=100, deadline=None)
@given(
    many=st.lists(messages, max_size=4),
    cuts=st.lists(st.integers(1, 90), max_size=9).map(lambda sizes: [*sizes, 30_000]),
)
def test_messages_arrive_whole_and_in_order_however_they_are_cut(
    many: list[Message], cuts: list[int]
) -> None:
    found = feed(Decoder(LIMITS), joined(*many), cuts)
    assert [plain(m) for m in found] == [plain(m) for m in many]


@settings(max_examples=200, deadline=None)
@given(
    many=st.lists(messages, max_size=2),
    junk=st.binary(min_size=1, max_size=300),
    cuts=st.lists(st.integers(1, 90), max_size=9).map(lambda sizes: [*sizes, 30_000]),
)
def test_random_bytes_are_refused_or_incomplete(
    many: list[Message], junk: bytes, cuts: list[int]
) -> None:
    decoder = Decoder(LIMITS)
    found = feed(decoder, joined(*many), cuts)
    try:
        found += feed(decoder, junk, cuts)
    except ProtocolError:
        return
    assert all(isinstance(m.fields, dict) for m in found)


@settings(max_examples=200, deadline=None)
@given(message=messages, at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_bit_that_flips_harms_nothing_else(message: Message, at: int, bit: int) -> None:
    data = bytearray(joined(message))
    data[at % len(data)] ^= 1 << bit
    try:
        found = feed(Decoder(LIMITS), bytes(data))
    except ProtocolError:
        return
    assert all(isinstance(m.fields, dict) for m in found)


@pytest.mark.parametrize(
    "data",
    [
        head(LIMITS.fields + 1),
        head(2**32 - 1),
        head(0, count=LIMITS.most + 1),
        head(0, count=2**32 - 1),
        head(0, LIMITS.buffers + 1),
        head(0, LIMITS.buffers, 1),
        head(0, 2**64 - 1),
    ],
)
def test_nothing_is_kept_of_a_message_that_is_too_long(data: bytes) -> None:
    asked: list[int] = []

    def allocate(size: int) -> memoryview:
        asked.append(size)
        return memoryview(bytearray(size))

    with pytest.raises(ProtocolError, match="too long"):
        feed(Decoder(LIMITS, allocate), data)
    assert asked == []


def test_memory_that_is_not_there_is_an_error_of_the_peer() -> None:
    def allocate(size: int) -> memoryview:
        raise MemoryError

    with pytest.raises(ProtocolError, match="no memory"):
        feed(Decoder(Limits(buffers=1 << 20, most=1), allocate), head(0, 1 << 18))


def test_a_small_message_that_comes_in_pieces_needs_no_memory_of_its_own() -> None:
    def allocate(size: int) -> memoryview:
        raise MemoryError

    message = Message({"a": 1}, [b"first", bytes(20_000), b""], 7)
    for cut in (1, 1000, 1 << 20):
        found = feed(Decoder(LIMITS, allocate), joined(message, message), [cut])
        assert [plain(x) for x in found] == [plain(message)] * 2


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"3",
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":%s}' % (b"9" * 101),
    ],
    ids=range(8),
)
def test_only_json_objects_with_finite_numbers_are_fields(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed(Decoder(LIMITS), head(len(body)) + body)


def test_what_does_not_begin_as_a_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="does not begin"):
        feed(Decoder(LIMITS), head(0, mark=b"GET "))


def test_what_cannot_be_sent() -> None:
    with pytest.raises(errors.InvalidValueError, match="small and plain"):
        encode(Message({"value": object()}), LIMITS)
    with pytest.raises(errors.InvalidValueError, match="small and plain"):
        encode(Message({"value": float("nan")}), LIMITS)
    with pytest.raises(errors.InvalidValueError, match="at most"):
        encode(Message({"value": "x" * LIMITS.fields}), LIMITS)
    with pytest.raises(errors.InvalidValueError, match="at most"):
        encode(Message({}, [bytes(10)]), Limits())
    assert plain(feed(Decoder(LIMITS), joined(Message({"value": "ü"})))[0])[0] == {"value": "ü"}


def test_large_buffers_are_not_copied() -> None:
    data = bytearray(1 << 18)
    pieces = encode(Message({}, [data]), LIMITS)
    assert pieces[-1].obj is data
    room = bytearray(len(data))
    decoder = Decoder(LIMITS, lambda _: memoryview(room))
    feed(decoder, bytes(pieces[0]))
    assert decoder.buffer().obj is room, "bytes go where they stay"


def test_bytes_may_follow_a_message() -> None:
    decoder = Decoder(LIMITS)
    data = joined(Message({"a": 1})) + b"follows"
    decoder.buffer()[: len(data)] = data
    decoder.received(len(data))
    message = decoder.next()
    assert message is not None
    assert message.fields == {"a": 1}
    into = bytearray(4)
    assert decoder.read(memoryview(into)) == 4
    assert into == b"foll"
    assert decoder.holds
    assert decoder.read(memoryview(bytearray(9))) == 3
    assert not decoder.holds


def test_memory_for_long_fields_is_given_back() -> None:
    decoder = Decoder(LIMITS)
    assert feed(decoder, joined(Message({"a": "x" * 500_000})))
    assert len(decoder.buffer()) < 100_000


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=50), max_size=50),
    most=st.integers(1, 60),
    counts=st.lists(st.integers(1, 100), min_size=1),
)
def test_a_queue_sends_everything_once(pieces: list[bytes], most: int, counts: list[int]) -> None:
    queue, sent, sizes = SendQueue(), b"", itertools.cycle(counts)
    queue.extend(memoryview(p) for p in pieces)
    while queue:
        views = queue.views(most)
        assert 0 < max(len(v) for v in views) <= most
        whole = b"".join(views)
        count = min(next(sizes), len(whole))
        sent += whole[:count]
        queue.sent(count)
    assert sent == b"".join(pieces)
    assert queue.size == 0


def test_what_was_read_ahead_is_taken_whole_or_not_at_all() -> None:
    frame = bytes(encode(Message({}, [b"same", b"site"], 7), LIMITS)[0])
    decoder, into = Decoder(LIMITS), memoryview(bytearray(4))
    decoder.put(memoryview(frame + b"dat"))
    assert not decoder.take(frame, into), "a byte is missing"
    decoder.put(memoryview(b"a, and more"))
    assert not decoder.take(frame[:-1] + b"?", into), "another message"
    assert decoder.take(frame, into)
    assert bytes(into) == b"data"
    decoder.give_back(len(frame) + len(into))
    assert decoder.next() == Message({}, [b"same", b"site"], 7)
    rest = memoryview(bytearray(100))
    assert bytes(rest[: decoder.read(rest)]) == b"data, and more"


@given(st.binary(max_size=100_000), st.binary(max_size=40_000))
@settings(max_examples=30, deadline=None)
def test_bytes_that_were_received_elsewhere_come_first(first: bytes, then: bytes) -> None:
    decoder = Decoder(LIMITS)
    decoder.put(memoryview(first))
    data = then
    while data:
        room = decoder.buffer()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        decoder.received(count)
        data = data[count:]
    into = memoryview(bytearray(200_000))
    assert bytes(into[: decoder.read(into)]) == first + then
