"""Requests performed on a store: buffers in, buffers out. No sockets, no files.

What a request changes follows from the store and the request alone, so a log of requests is enough to
make a store again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.errors import PhalanxError
from phalanx.net.framing import ProtocolError
from phalanx.parameter_server import wire
from phalanx.parameter_server.landing import put
from phalanx.parameter_server.requests import VariableDefinition
from phalanx.parameter_server.store import Outcome, Store, view_of
from phalanx.parameter_server.wire import Buffers, Kind, Where

__all__ = ["Answer", "perform"]


class Answer(NamedTuple):
    """What a server answers.

    Args:
        buffers: the answer.
        has_changed: whether the request has changed what the server holds.
        landed: bytes that were written into memory of the peer.
    """

    buffers: list[Any]
    has_changed: bool = False
    landed: int = 0


def perform(store: Store, buffers: Buffers, landing: memoryview | None = None) -> Answer:
    """Do what is asked for. What makes no sense is answered with an error and changes nothing.

    Args:
        store: what is held.
        buffers: the request.
        landing: memory of the peer, where it may want values that it reads.
    """
    kind = wire.kind_of(buffers)
    command = _COMMANDS.get(kind)
    if command is None:
        raise ProtocolError(f"A store cannot do this: {kind}")
    try:
        if command is _pull:
            return _pull(store, buffers, landing)
        return command(store, buffers)
    except ProtocolError:
        raise
    except PhalanxError as error:
        return Answer(wire.failed(error))


def _definition_of(store: Store) -> Any:
    def find(variable: int) -> VariableDefinition:
        return store.held(variable).definition

    return find


def _done(outcome: Outcome) -> Answer:
    return Answer(wire.done(outcome), outcome is Outcome.DONE)


def _create(store: Store, buffers: Buffers) -> Answer:
    definition, value = wire.read_create(buffers)
    if not value.flags.writeable or not value.flags.aligned:
        value = value.copy()
    return _done(Outcome.DONE if store.create(definition, value) else Outcome.REPEATED)


def _optimizer(store: Store, buffers: Buffers) -> Answer:
    is_new = store.define_optimizer(wire.read_optimizer(buffers))
    return _done(Outcome.DONE if is_new else Outcome.REPEATED)


def _find(store: Store, buffers: Buffers) -> Answer:
    is_held = store.find(wire.read_find(buffers))
    return _done(Outcome.REPEATED if is_held else Outcome.REFUSED)


def _free(store: Store, buffers: Buffers) -> Answer:
    return _done(store.free(*wire.read_free(buffers)))


def _pull(store: Store, buffers: Buffers, landing: memoryview | None = None) -> Answer:
    values: list[tuple[int, Where, Any]] = []
    wanted, after = wire.read_pull(buffers)
    if store.doubtful and (doubts := store.doubts({w.variable for w in wanted}, after)):
        return Answer(wire.doubted(doubts))
    changes = store.staged_by(after) if after else {}
    landed = 0
    for variable, known, rows, place in wanted:
        held = store.held(variable)
        version = held.version
        if variable in changes:
            version, value = 0, store.after(changes[variable], variable, rows)
        elif rows is not None:
            value = view_of(store.rows(variable, rows))
        elif known == version:
            values.append((version, Where.KNOWN, None))
            continue
        else:
            value = held.lend()
        if place < 0 or landing is None:
            values.append((version, Where.HERE, value))
        else:
            put(value, landing, place)
            landed += len(value)
            values.append((version, Where.LANDED, None))
    store.counts["pulls"] += 1
    return Answer(wire.pulled(values), landed=landed)


def _apply(store: Store, buffers: Buffers) -> Answer:
    _, updates, _ = wire.read_push(buffers, _definition_of(store))
    store.apply(updates)
    return _done(Outcome.DONE)


def _preview(store: Store, buffers: Buffers) -> Answer:
    _, updates, _ = wire.read_push(buffers, _definition_of(store))
    values = [(0, Where.HERE, wire.bytes_of(value)) for value in store.preview(updates)]
    return Answer(wire.pulled(values))


def _push(store: Store, buffers: Buffers) -> Answer:
    return _done(store.push(*wire.read_push(buffers, _definition_of(store))))


def _stage(store: Store, buffers: Buffers) -> Answer:
    return _done(store.stage(*wire.read_push(buffers, _definition_of(store))))


def _commit(store: Store, buffers: Buffers) -> Answer:
    return _done(store.commit(wire.read_token(buffers)))


def _drop(store: Store, buffers: Buffers) -> Answer:
    return _done(store.drop(wire.read_token(buffers)))


def _inquire(store: Store, buffers: Buffers) -> Answer:
    found = [store.inquire(token) for token in wire.read_inquire(buffers)]
    return Answer(wire.inquired(found), has_changed=True)


def _decide(store: Store, buffers: Buffers) -> Answer:
    outcomes = [store.decide(token, is_commit) for token, is_commit in wire.read_decide(buffers)]
    return Answer(wire.done(Outcome.DONE), Outcome.DONE in outcomes)


def _forget(store: Store, buffers: Buffers) -> Answer:
    return _done(store.forget(wire.read_number(buffers)))


_COMMANDS: dict[int, Callable[[Store, Buffers], Answer]] = {
    Kind.CREATE: _create,
    Kind.OPTIMIZER: _optimizer,
    Kind.PULL: _pull,
    Kind.APPLY: _apply,
    Kind.PUSH: _push,
    Kind.PREVIEW: _preview,
    Kind.STAGE: _stage,
    Kind.COMMIT: _commit,
    Kind.DROP: _drop,
    Kind.INQUIRE: _inquire,
    Kind.DECIDE: _decide,
    Kind.FORGET: _forget,
    Kind.FREE: _free,
    Kind.FIND: _find,
}
