"""A store as records, and a store from records.

Taking a snapshot copies nothing: values that it refers to are not changed in place any more, so that
another thread can write them while the server goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import DataLossError
from phalanx.net.framing import fields_of
from phalanx.parameter_server import wire
from phalanx.parameter_server.commands import perform
from phalanx.parameter_server.journal import Journal, read_journal
from phalanx.parameter_server.server_optimizer import Slots
from phalanx.parameter_server.store import Store
from phalanx.parameter_server.wire import Kind

__all__ = ["load_snapshot", "records_of", "sync_folder", "write_snapshot"]

_SLOTS, _TOKENS, _END = 201, 202, 203  # kinds of records that are no requests

Record = list[Any]


def records_of(store: Store) -> list[Record]:
    """Everything that a store holds, as it is now."""
    records: list[Record] = []
    for optimizer in store.optimizers.values():
        records.append(wire.optimizer(optimizer.definition))
    for held in store.variables.values():
        records.append(wire.with_fields(Kind.CREATE, vars(held.definition), held.lend()))
        for number, slots in held.slots.items():
            records.append(_slots_record(held.definition.id, number, slots))
    for token, (updates, value) in store.staged.items():
        records.append(wire.push(Kind.STAGE, token, updates, value))
    records.append(_tokens_record(store))
    records.append([bytes([_END]) + str(len(records)).encode()])
    return records


def _slots_record(variable: int, optimizer: int, slots: Slots) -> Record:
    for leaf in slots.leaves:
        leaf.setflags(write=False)  # the next change of rows makes a copy
    described = [[leaf.dtype.name, leaf.shape] for leaf in slots.leaves]
    fields = {"variable": variable, "optimizer": optimizer, "leaves": described}
    return [_packed(_SLOTS, fields), *(wire.bytes_of(np.ascontiguousarray(x)) for x in slots.leaves)]


def _tokens_record(store: Store) -> Record:
    fields = {
        "settled": store.settled,
        "freed": list(store.freed),
        "counts": store.counts,
        "values": [[closure, len(value)] for closure, value in store.values.items()],
        "fences": [[closure, sorted(attempts)] for closure, attempts in store.fences.items()],
    }
    known = [np.array(list(d.items()), np.int64) for d in (store.applied, store.own)]
    return [_packed(_TOKENS, fields), *map(wire.bytes_of, known), b"".join(store.values.values())]


def _packed(kind: int, fields: dict[str, Any]) -> bytes:
    return bytes([kind]) + json.dumps(fields).encode()


def write_snapshot(path: Path, records: Iterable[Record], *, sync: bool = True) -> None:
    """Write a snapshot; afterwards either all of it is there, or nothing.

    Args:
        path: of the file.
        records: what it holds.
        sync: whether it shall survive the death of the machine, too.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    journal = Journal(fresh)
    try:
        for record in records:
            journal.append(record)
        if sync:
            journal.sync()
    finally:
        journal.close()
    fresh.replace(path)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Let the disk have the names of the files in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_snapshot(path: Path, store: Store) -> None:
    """Fill an empty store with what a snapshot holds."""
    for record in _complete(path):
        kind = record[0][0]
        if kind == _SLOTS:
            _load_slots(store, record)
        elif kind == _TOKENS:
            _load_tokens(store, record)
        else:
            wire.read_outcome(perform(store, record).buffers)


def _complete(path: Path) -> Iterator[list[bytes]]:
    for i, record in enumerate(read_journal(path, may_be_torn=False)):
        if record[0][0] == _END:
            if int(record[0][1:]) == i:
                return
            break
        yield record
    raise DataLossError(f"A snapshot of a parameter server is not complete. Received: {path}")


def _load_slots(store: Store, record: list[bytes]) -> None:
    fields = fields_of(record[0][1:])
    held = store.held(fields["variable"])
    number = fields["optimizer"]
    structure = store.optimizers[number].slots(held.value).structure
    leaves = [
        wire.array_of(buffer, np.dtype(dtype), tuple(shape))
        for (dtype, shape), buffer in zip(fields["leaves"], record[1:], strict=True)
    ]
    held.slots[number] = Slots(leaves, structure)


def _load_tokens(store: Store, record: list[bytes]) -> None:
    fields = fields_of(record[0][1:])
    store.settled = fields["settled"]
    store.freed = dict.fromkeys(fields.get("freed", ()))
    store.counts.update(fields["counts"])
    store.applied.update(_pairs(record[1]))
    store.own.update(_pairs(record[2]))
    at = 0
    for closure, size in fields["values"]:
        store.values[closure] = record[3][at : at + size]
        at += size
    for closure, attempts in fields["fences"]:
        store.fences[closure] = set(attempts)


def _pairs(buffer: bytes) -> Iterator[tuple[int, int]]:
    return ((int(c), int(a)) for c, a in np.frombuffer(buffer, np.int64).reshape(-1, 2))
