"""`px.data.Options`: how a dataset is to be run and distributed."""

from __future__ import annotations

from typing import Any

from phalanx.core.options import NamedEnum
from phalanx.errors import InvalidOperandError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown


class AutoShardPolicy(NamedEnum):
    """How a dataset is divided between workers.

    OFF: every worker reads everything. AUTO: by FILE if there are files, else by DATA. FILE: each
    worker reads files of its own. DATA: each worker reads everything and keeps its part. HINT: like
    DATA, at the place marked with ``shard(SHARD_HINT, SHARD_HINT)``.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class _Settings:
    """Attributes of which only known ones can be set."""

    _defaults: dict[str, Any]

    def __init__(self) -> None:
        object.__setattr__(self, "_set", {})

    def _check(self, name: str, value: Any) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._defaults:
            raise self._unknown(name)
        return self._set.get(name, self._defaults[name])

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._defaults:
            raise self._unknown(name)
        self._set[name] = self._check(name, value)

    def _unknown(self, name: str) -> InvalidOperandError:
        return InvalidOperandError(
            f"{type(self).__name__} has the attributes {', '.join(sorted(self._defaults))}. "
            f"Received: {name}"
        )

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._defaults}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values().items())
        return f"{type(self).__name__}({values})"

    def __getstate__(self) -> dict[str, Any]:
        return dict(self._set)

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "_set", dict(state))


class DistributeOptions(_Settings):
    """How a dataset is distributed.

    Attributes:
        auto_shard_policy: an `AutoShardPolicy`, or its name or number. AUTO if not set.
        num_devices: accepted for ported code, and ignored.
    """

    _defaults = {"auto_shard_policy": AutoShardPolicy.AUTO, "num_devices": None}  # noqa: RUF012

    def _check(self, name: str, value: Any) -> Any:
        if name == "num_devices":
            return value
        try:
            return AutoShardPolicy(value)
        except ValueError:
            raise InvalidValueError(
                "auto_shard_policy must be one of "
                f"{', '.join(AutoShardPolicy.__members__)}. Received: {shown(value)}"
            ) from None


class Options(_Settings):
    """How a dataset is to be run and distributed; given to `Dataset.with_options`.

    Attributes:
        deterministic: whether parallel `map` and `interleave` keep the order, unless they are told
            otherwise themselves. True if not set. `experimental_deterministic` is the same.
        experimental_distribute: the `DistributeOptions`.

    Examples:
        >>> import phalanx as px
        >>> options = px.data.Options()
        >>> options.experimental_distribute.auto_shard_policy = "data"
        >>> options.experimental_distribute.auto_shard_policy
        AutoShardPolicy.DATA
    """

    _defaults = {"deterministic": True, "experimental_distribute": None}  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name == "experimental_deterministic":
            name = "deterministic"
        if name == "experimental_distribute":
            return self._set.setdefault(name, DistributeOptions())
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("deterministic" if name == "experimental_deterministic" else name, value)

    def _check(self, name: str, value: Any) -> Any:
        kind: Any = bool if name == "deterministic" else DistributeOptions
        if not isinstance(value, kind):
            raise InvalidTypeError(f"{name} must be a {kind.__name__}. Received: {shown(value)}")
        return value

    def merge(self, other: Options) -> Options:
        """These options, with everything that `other` sets taken from there."""
        merged = Options()
        for options in (self, other):
            if "deterministic" in options._set:
                merged.deterministic = options.deterministic
            merged.experimental_distribute._set.update(options.experimental_distribute._set)
        return merged
