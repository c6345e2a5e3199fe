"""MindSpore's strategy files in protobuf: the messages of its `node_strategy.proto`, as Python data.

Files whose name does not end with .json have this form. The data is what files in JSON have. Only the
shapes of tensors are missing, which the messages have no field for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.runtime.protobuf_wire import Malformed, bytes_field, int32, int_field, read_varint, values

__all__ = ["decoded", "decoded_groups", "encoded", "encoded_groups"]

_STAGE, _OPERATORS, _LAYOUTS = 1, 2, 3
_NAME, _CONTENT = 1, 2
_MATRIX, _MAP, _SPLIT, _OFFSET, _FIELD, _STEP, _SIZE = 1, 2, 3, 4, 5, 6, 7
_GROUPS, _RESTORED = 1, 2
_DIM = 1
_PLAN = 1000
"""A field of ours, with the JSON of a plan. Readers that do not know a field leave it out."""


def encoded(data: Mapping[str, Any], plan: str | None = None) -> bytes:
    """The message of a strategy file.

    Args:
        data: with the keys of a strategy file in JSON.
        plan: the JSON of a plan.

    >>> layout = {"dev_matrix": [2, 4], "tensor_map": [-1, 0]}
    >>> decoded(encoded({"parallel_layout_item": {"w": layout}}))[0]["parallel_layout_item"]["w"]
    {'dev_matrix': [2, 4], 'tensor_map': [-1, 0], 'field': 0, 'opt_weight_shard_step': 0, \
'opt_weight_shard_size': 0}
    """
    message = int_field(_STAGE, int(data.get("current_stage", 0)))
    for name, item in data.get("parallel_strategy_item", {}).items():
        cuts = b"".join(bytes_field(2, _dims(each)) for each in item["parallel_strategy"])
        message += _item(_OPERATORS, name, int_field(1, int(item["stage"])) + cuts)
    for name, item in data.get("parallel_layout_item", {}).items():
        content = bytes_field(_MATRIX, _dims(item["dev_matrix"]))
        content += bytes_field(_MAP, _dims(item["tensor_map"]))
        content += bytes_field(_SPLIT, b"") + bytes_field(_OFFSET, b"")
        for number, key in ((_FIELD, "field"), (_STEP, "opt_weight_shard_step")):
            content += int_field(number, int(item.get(key, 0)))
        content += int_field(_SIZE, int(item.get("opt_weight_shard_size", 0)))
        message += _item(_LAYOUTS, name, content)
    return message if plan is None else message + bytes_field(_PLAN, plan.encode())


def decoded(content: bytes) -> tuple[dict[str, Any], str | None]:
    """The data of a strategy file, and the JSON of the plan in it.

    Raises:
        Malformed: if it is no such message.
    """
    data: dict[str, Any] = {
        "current_stage": 0,
        "parallel_strategy_item": {},
        "parallel_layout_item": {},
    }
    plan: str | None = None
    for number, value in values(content):
        if number == _STAGE and isinstance(value, int):
            data["current_stage"] = value
        elif number == _PLAN:
            plan = _text(value)
        elif number in (_OPERATORS, _LAYOUTS):
            name, inner = _named(value)
            if number == _OPERATORS:
                stage = next((v for n, v in inner if n == 1), 0)
                cuts = [_listed(v) for n, v in inner if n == 2]
                data["parallel_strategy_item"][name] = {"stage": stage, "parallel_strategy": cuts}
            else:
                data["parallel_layout_item"][name] = {
                    "dev_matrix": next((_listed(v) for n, v in inner if n == _MATRIX), []),
                    "tensor_map": next((_listed(v) for n, v in inner if n == _MAP), []),
                    "field": _number(inner, _FIELD),
                    "opt_weight_shard_step": _number(inner, _STEP),
                    "opt_weight_shard_size": _number(inner, _SIZE),
                }
    return data, plan


def encoded_groups(groups: Mapping[str, Sequence[int]], restored: Sequence[int]) -> bytes:
    """The message of a file of groups: the devices of each, and those that have what one device has."""
    items = b"".join(_item(_GROUPS, name, _dims(ranks)) for name, ranks in groups.items())
    return items + bytes_field(_RESTORED, _dims(restored))


def decoded_groups(content: bytes) -> tuple[dict[str, list[int]], list[int]]:
    """The opposite of `encoded_groups`.

    >>> decoded_groups(encoded_groups({"0-2": [0, 2]}, [0, 2]))
    ({'0-2': [0, 2]}, [0, 2])
    """
    groups: dict[str, list[int]] = {}
    restored: list[int] = []
    for number, value in values(content):
        if number == _GROUPS:
            parts = dict(values(_bytes(value)))
            groups[_text(parts.get(_NAME))] = _listed(parts.get(_CONTENT, b""))
        elif number == _RESTORED:
            restored = _listed(value)
    return groups, restored


def _item(number: int, name: str, content: bytes) -> bytes:
    return bytes_field(number, bytes_field(_NAME, name.encode()) + bytes_field(_CONTENT, content))


def _dims(numbers: Sequence[int]) -> bytes:
    return b"".join(int_field(_DIM, int(n)) for n in numbers)


def _named(value: int | bytes) -> tuple[str, list[tuple[int, int | bytes]]]:
    parts = dict(values(_bytes(value)))
    return _text(parts.get(_NAME)), values(_bytes(parts.get(_CONTENT, b"")))


def _listed(value: int | bytes) -> list[int]:
    """Numbers, each in a field of its own, or packed."""
    found: list[int] = []
    for number, each in values(_bytes(value)):
        if number != _DIM:
            continue
        if isinstance(each, int):
            found.append(int32(each))
            continue
        at = 0
        while at < len(each):
            one, at = read_varint(each, at)
            found.append(int32(one))
    return found


def _number(fields: Sequence[tuple[int, int | bytes]], number: int) -> int:
    found = next((v for n, v in fields if n == number), 0)
    return int32(found) if isinstance(found, int) else 0


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise Malformed("there is a number where a message should be")
    return value


def _text(value: int | bytes | None) -> str:
    if not isinstance(value, bytes):
        raise Malformed("a name is missing")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Malformed("a name is no text") from None
