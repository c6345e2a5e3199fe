"""Options and enumerations of the public API: frozen data, validated when made."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from phalanx.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from phalanx.runtime.formatting import shown


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
    """How collectives travel between workers: AUTO, RING or NCCL.

    JAX chooses the transport: gloo between CPUs, NCCL between GPUs. The choice here matters to two CPU
    workers only: with AUTO they exchange directly, with RING or NCCL they use XLA's all-reduce.
    """

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
    """Options of `Strategy.run`, accepted so that ported code runs. No field has an effect.

    In TensorFlow they steer the compiler for TPUs. Here JAX compiles every step, batches of any size
    are compiled exactly, and options of XLA are set with `jax.jit` or the variable ``XLA_FLAGS``.

    Attributes:
        experimental_enable_dynamic_batch_size: has no effect; a partial batch keeps its true size.
        experimental_bucketizing_dynamic_shape: has no effect; pad batches in the dataset instead.
        experimental_xla_options: has no effect; set ``XLA_FLAGS`` instead.
    """

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


class VariableSynchronization(NamedEnum):
    """When the copies of a variable are brought together.

    AUTO means ON_WRITE. ON_WRITE keeps all copies equal: writes are aggregated. ON_READ lets each
    replica write a copy of its own and aggregates when the variable is read outside of replicas.
    NONE is for variables without a strategy.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(NamedEnum):
    """How the values that replicas write to a variable become one value.

    NONE refuses to choose: replicas that write different values are an error.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


def check_kinds(synchronization: Any, aggregation: Any, name: str) -> None:
    """Require enum members, as TensorFlow does; strings are not accepted."""
    if not isinstance(synchronization, VariableSynchronization):
        raise InvalidValueError(
            f"synchronization of variable {name!r} must be a px.VariableSynchronization. "
            f"Received: {shown(synchronization)}"
        )
    if not isinstance(aggregation, VariableAggregation):
        raise InvalidValueError(
            f"aggregation of variable {name!r} must be a px.VariableAggregation. "
            f"Received: {shown(aggregation)}"
        )


def effective_synchronization(
    synchronization: VariableSynchronization, name: str
) -> VariableSynchronization:
    """The synchronization of a variable that has several copies."""
    if synchronization is VariableSynchronization.AUTO:
        return VariableSynchronization.ON_WRITE
    if synchronization is VariableSynchronization.NONE:
        raise InvalidValueError(
            "Variables with copies on several replicas need a synchronization: ON_WRITE or "
            f"ON_READ. Received: synchronization=NONE for variable {shown(name)}"
        )
    return synchronization


def check_dtype(aggregation: VariableAggregation, dtype: Any, name: str) -> None:
    """MEAN cannot be stored in a type without fractions."""
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise InvalidValueError(
            f"Variable {name!r} cannot average values in the integer type {dtype}. Use a floating "
            f"dtype or another aggregation. Received: aggregation=MEAN, dtype={dtype}"
        )


def check_scatter(method: str, aggregation: VariableAggregation, name: str) -> None:
    """Sums and means of sparse updates are defined for adding and subtracting only."""
    additive = method in ("scatter_add", "scatter_sub")
    reducing = aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
    if reducing and not additive:
        raise UnsupportedError(
            f"{method} from several replicas has no sum or mean. Use scatter_add or scatter_sub, "
            "or create the variable with aggregation NONE or ONLY_FIRST_REPLICA. "
            f"Received: aggregation={aggregation.name} on variable {shown(name)}"
        )


def copy_value_for_read_sum(value: Any, replicas: int, dtype: Any) -> Any:
    """What each copy of an ON_READ/SUM variable holds so that reading it gives `value` back.

    An equal share, cut to the dtype: an integer that does not divide reads back smaller.
    """
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return lax.div(array, jnp.asarray(replicas, array.dtype)).astype(dtype)
    return (array / replicas).astype(dtype)


def share_of_read_sum(value: Any, replicas: int, number: int) -> np.ndarray[Any, Any]:
    """What one copy of an integer ON_READ/SUM variable holds so that all of them together are `value`.

    >>> [int(share_of_read_sum(10, 4, number)) for number in range(4)]
    [3, 3, 2, 2]
    """
    array = np.asarray(value)
    wide = array if array.dtype.itemsize == 8 else array.astype(np.int64)
    share, rest = np.divmod(wide, replicas)
    return (share + (number < rest)).astype(array.dtype)
