"""Options and enumerations of the public API: frozen data, validated when made."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from phalanx.core.errors import InvalidTypeError, InvalidValueError
from phalanx.core.showing import shown


class NamedEnum(enum.Enum):
    """An enumeration whose members can also be given by name in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if isinstance(value, str):
            return cls.__members__.get(value.upper())
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    __str__ = __repr__


class CommunicationImplementation(NamedEnum):
    """A hint for which transport collectives should use: AUTO, RING or NCCL."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


class CommunicationOptions:
    """Options for collectives.

    Args:
        bytes_per_pack: tensors are packed into buffers of about this many bytes before they
            travel; 0 lets Phalanx choose: tensors of up to 64 KB travel together, of up to 256 KB
            between workers, and larger ones alone.
        timeout_seconds: how long to wait for the other workers; None for the default.
        implementation: a `CommunicationImplementation` or its name.

    Examples:
        >>> import phalanx as px
        >>> px.experimental.CommunicationOptions(implementation="ring").implementation
        CommunicationImplementation.RING
    """

    __slots__ = ("bytes_per_pack", "implementation", "timeout_seconds")

    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: CommunicationImplementation

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        if isinstance(bytes_per_pack, bool) or not isinstance(bytes_per_pack, int):
            raise InvalidTypeError(f"bytes_per_pack must be an int. Received: {shown(bytes_per_pack)}")
        if bytes_per_pack < 0:
            raise InvalidValueError(f"bytes_per_pack must be >= 0. Received: {bytes_per_pack}")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise InvalidValueError(
                f"timeout_seconds must be a positive number or None. Received: {shown(timeout_seconds)}"
            )
        try:
            chosen = CommunicationImplementation(implementation)
        except ValueError:
            raise InvalidValueError(
                f"{implementation!r} is not a valid CommunicationImplementation; choose one of "
                f"{', '.join(CommunicationImplementation.__members__)}. "
                f"Received: {shown(implementation)}"
            ) from None
        object.__setattr__(self, "bytes_per_pack", bytes_per_pack)
        object.__setattr__(self, "timeout_seconds", timeout_seconds)
        object.__setattr__(self, "implementation", chosen)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"CommunicationOptions are frozen; make new ones to change {name!r}")

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """These options, with each field that `options` sets taken from there."""
        if options is None:
            return self
        if not isinstance(options, CommunicationOptions):
            raise InvalidTypeError(f"Can only merge CommunicationOptions. Received: {shown(options)}")
        auto = CommunicationImplementation.AUTO
        return CommunicationOptions(
            bytes_per_pack=options.bytes_per_pack or self.bytes_per_pack,
            timeout_seconds=(
                self.timeout_seconds if options.timeout_seconds is None else options.timeout_seconds
            ),
            implementation=(
                self.implementation if options.implementation is auto else options.implementation
            ),
        )

    def _key(self) -> tuple[Any, ...]:
        return (self.bytes_per_pack, self.timeout_seconds, self.implementation)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CommunicationOptions) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return (
            f"Options(bytes_per_pack={self.bytes_per_pack},"
            f"timeout_seconds={self.timeout_seconds}, implementation={self.implementation})"
        )


def collective_hints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """The older spelling of `CommunicationOptions`, kept for ported code."""
    return CommunicationOptions(bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_seconds)


def as_communication_options(options: Any) -> CommunicationOptions:
    """Check an optional ``options`` argument."""
    if options is None:
        return CommunicationOptions()
    if isinstance(options, CommunicationOptions):
        return options
    raise InvalidTypeError(
        "options must be a px.experimental.CommunicationOptions or None. "
        f"Received: {shown(options)} of type {type(options).__name__}"
    )


class RunOptions(NamedTuple):
    """Options of `Strategy.run`. They concern compiled execution on TPUs; others ignore them."""

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


class InputReplicationMode(NamedEnum):
    """How often an input function is called: once per worker or once per replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class _InputOptions(NamedTuple):
    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int


class InputOptions(_InputOptions):
    """Options of distributed datasets: placement, prefetching and replication.

    Args:
        experimental_fetch_to_device: whether elements are put on the replicas' devices ahead of time.
            If not, they stay NumPy arrays of the host. None, the default, means True.
        experimental_replication_mode: whether an input function is called once per worker or once per
            replica.
        experimental_place_dataset_on_device: with PER_REPLICA and without fetching ahead: put elements
            on the device when they are asked for.
        experimental_per_replica_buffer_size: how many elements are prepared ahead; 0 for none.

    Examples:
        >>> import phalanx as px
        >>> px.InputOptions(experimental_fetch_to_device=False).experimental_per_replica_buffer_size
        1
    """

    __slots__ = ()

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
    ) -> InputOptions:
        """Fill in the defaults."""
        fetch = True if experimental_fetch_to_device is None else experimental_fetch_to_device
        return super().__new__(
            cls,
            fetch,
            experimental_replication_mode,
            experimental_place_dataset_on_device,
            experimental_per_replica_buffer_size,
        )


class InputContext:
    """What an input function needs to know about the pipeline it builds.

    Examples:
        >>> import phalanx as px
        >>> context = px.InputContext(num_input_pipelines=2, input_pipeline_id=1,
        ...                           num_replicas_in_sync=4)
        >>> context.get_per_replica_batch_size(8)
        2
        >>> print(context)
        px.InputContext(input pipeline id 1, total: 2)
    """

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ) -> None:
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """How many input pipelines there are, usually one per worker."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """The index of this pipeline."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas train together, over all workers."""
        return self._num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The part of a global batch that one replica gets; the batch must divide evenly."""
        if global_batch_size % self._num_replicas_in_sync:
            raise InvalidValueError(
                f"The global batch size {shown(global_batch_size)} is not divisible by the number of "
                f"replicas in sync, {self._num_replicas_in_sync}. Choose a multiple of it. "
                f"Received: global_batch_size={shown(global_batch_size)}"
            )
        return global_batch_size // self._num_replicas_in_sync

    def __str__(self) -> str:
        return (
            f"px.InputContext(input pipeline id {self._input_pipeline_id}, "
            f"total: {self._num_input_pipelines})"
        )

    __repr__ = __str__


class ValueContext:
    """What a value function needs to know about the replica it makes a value for.

    Examples:
        >>> import phalanx as px
        >>> print(px.experimental.ValueContext(1, 2))
        px.experimental.ValueContext(replica id 1, total replicas in sync: 2)
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1) -> None:
        self._replica_id_in_sync_group = replica_id_in_sync_group
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """The index of the replica."""
        return self._replica_id_in_sync_group

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are."""
        return self._num_replicas_in_sync

    def __str__(self) -> str:
        return (
            f"px.experimental.ValueContext(replica id {self._replica_id_in_sync_group}, "
            f"total replicas in sync: {self._num_replicas_in_sync})"
        )

    __repr__ = __str__
