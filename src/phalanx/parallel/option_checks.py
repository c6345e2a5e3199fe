"""Checks of single values of options, with the errors and texts of MindSpore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import InvalidKeyError, InvalidTypeError, InvalidValueError
from phalanx.parallel.device_layout import Layout
from phalanx.runtime.formatting import shown

__all__ = [
    "check_comm_fusion",
    "check_dataset_strategy",
    "check_fusion_indices",
    "check_known_keys",
    "check_type",
]

_SETTER = "For 'set_auto_parallel_context()"
_FUSED = ("allreduce", "allgather", "reducescatter")


def check_type(name: str, value: Any, kind: type) -> None:
    """Require a type.

    >>> check_type("gradients_mean", True, bool)
    """
    if not isinstance(value, kind):
        raise InvalidTypeError(f"The parameter '{name}' must be {kind}, but got {type(value)}")


def check_known_keys(config: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse keys of a dictionary that mean nothing."""
    unknown = [key for key in config if key not in known]
    if unknown:
        raise InvalidValueError(f"Unknown config: {unknown}")


def check_dataset_strategy(
    value: Any,
    where: str = "set_auto_parallel_context",
    argument: str = "dataset_strategy",
    element: str = "tuple",
) -> Any:
    """How batches reach devices: "data_parallel", "full_batch", tuples of cuts, or layouts."""
    what = f"For '{where}', the argument '{argument}'"
    if isinstance(value, str):
        if value not in ("full_batch", "data_parallel"):
            raise InvalidValueError(
                f"{what} must be 'full_batch' or 'data_parallel', but got the value : {value}."
            )
        return value
    if not isinstance(value, tuple):
        raise InvalidTypeError(f"{what} must be str or tuple type, but got the type : {type(value)}.")
    if value and isinstance(value[0], Layout):
        return _checked_layouts(value)
    for cuts in value:
        part = f"For '{where}', the element of argument '{argument}'"
        if not isinstance(cuts, tuple):
            raise InvalidTypeError(f"{part} must be {element}, but got the type : {type(cuts)} .")
        for count in cuts:
            if not isinstance(count, int):
                raise InvalidTypeError(f"{part} must be int type, but got the type : {type(count)} .")
    return value


def _checked_layouts(layouts: tuple[Any, ...]) -> tuple[Layout, ...]:
    for layout in layouts:
        if not isinstance(layout, Layout):
            raise InvalidTypeError(
                f"All the dataset_strategy elements should be Layout, but got {type(layout)}"
            )
        if layout.to_dict()["interleaved_parallel"]:
            raise InvalidValueError(
                "For dataset_strategy, layout does not support interleaved_parallel"
            )
    return layouts


def check_fusion_indices(indices: Any) -> tuple[int, ...]:
    """The last gradient of each bucket but the last."""
    what = f"{_SETTER}.set_all_reduce_fusion_split_indices'"
    if not indices:
        raise InvalidValueError(f"{what}, the argument 'indices' can not be empty")
    if not isinstance(indices, list):
        raise InvalidTypeError(
            f"{what}, the argument 'indices' must be list, but got the type : {type(indices)} ."
        )
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int):
            raise InvalidTypeError(
                f"{what}, the argument 'index' must be int, but got the type : {type(index)} ."
            )
        if index < 0:
            raise InvalidTypeError(
                f"{what}, the argument 'index' must not be negative, but got {index}"
            )
    if len(set(indices)) != len(indices):
        raise InvalidValueError("The indices has duplicate elements")
    if sorted(indices) != indices:
        raise InvalidValueError(
            f"{what}, the elements in argument 'indices' must be sorted in ascending order"
        )
    return tuple(indices)


def check_comm_fusion(config: Any, present: Mapping[str, Any]) -> dict[str, Any]:
    """How collectives are packed: what is given, and the rest as it is at present."""
    check_type("comm_fusion", config, dict)
    result = dict(present)
    for key, value in config.items():
        if key == "openstate":
            if not isinstance(value, bool):
                raise InvalidTypeError(
                    f"For 'comm_fusion', the 'openstate' must be bool, "
                    f"but got the type : {type(value)}."
                )
            result[key] = value
        elif key in _FUSED:
            result[key] = _checked_fusion(key, value)
        else:
            raise InvalidKeyError(
                "comm fusion type must be openstate,allreduce, allgather or reducescatter, "
                f"but got {key}"
            )
    if "openstate" not in config and config:
        result["openstate"] = True
    return result


def _checked_fusion(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidTypeError(
            f"For 'comm_fusion', the '{name}' config must be dict, but got the type : {type(value)}."
        )
    for key in ("mode", "config"):
        if key not in value:
            raise InvalidKeyError(f"For 'comm_fusion', the key '{key}' should be contained.")
    modes = ("auto", "index", "size") if name == "allreduce" else ("auto", "size")
    mode, config = value["mode"], value["config"]
    if mode not in modes:
        listed = "auto, index or size" if name == "allreduce" else "auto or size"
        raise InvalidKeyError(f"fusion method mode must be {listed}, but got {mode}")
    if mode == "index":
        config = list(check_fusion_indices(config))
    elif mode == "size":
        if isinstance(config, bool) or not isinstance(config, int):
            raise InvalidTypeError(
                f"fusion threshold must be int, but got the type : {type(config)}. "
                f"Received: {shown(config)}"
            )
        if config < 0:
            raise InvalidValueError(f"fusion threshold must be larger than 0, but got {config}")
    return {"mode": mode, "config": config}
