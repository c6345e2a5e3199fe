"""`px.errors`: everything that Phalanx raises on purpose.

Every error that Phalanx raises on purpose is a `PhalanxError`, and is also the builtin that
`tf.distribute` raises at the same place, so ported ``except`` clauses keep working. Each docstring
says when the error happens, whose fault it usually is, and what to do.
"""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "CancelledError",
    "ClosureInputError",
    "ClusterEnvironmentError",
    "CollectiveMismatchError",
    "ContextError",
    "DataLossError",
    "DatasetFunctionError",
    "DeadlineExceededError",
    "DivergenceError",
    "DuplicateDeviceError",
    "DuplicateTaskError",
    "FailedPreconditionError",
    "ForeignVariableError",
    "FrozenDevicesError",
    "HubLostError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidDestinationError",
    "InvalidKeyError",
    "InvalidOperandError",
    "InvalidOptionsError",
    "InvalidReduceOpError",
    "InvalidTypeError",
    "InvalidValueError",
    "MergeMismatchError",
    "MirroredReductionError",
    "MissingPackageError",
    "NoReplicaContextError",
    "NoTPUError",
    "NotFoundError",
    "OpError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "PhalanxError",
    "RemoteDeviceError",
    "ResourceExhaustedError",
    "ServerStateLostError",
    "StagedValueError",
    "StrategyMismatchError",
    "StructureMismatchError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnbatchedDatasetError",
    "UnimplementedError",
    "UnknownError",
    "UnsupportedError",
    "VersionMismatchError",
    "WorkerFailedError",
    "WorkerLostError",
]


class PhalanxError(Exception):
    """Root of all errors that Phalanx raises on purpose."""


# -- contexts -----------------------------------------------------------------------------------


class ContextError(PhalanxError, RuntimeError):
    """A method was called in the wrong context.

    For example `Strategy.run` inside a function that already runs on a replica. The message says
    which context is needed and how to get there.
    """


class StagedValueError(ContextError, TypeError):
    """Python code asked for the value of something that a compiled function only computes later.

    Usually a branch on the replica id or on an array. Write it with `jnp.where` or `jax.lax.cond`, or
    run the step eagerly.
    """


class StrategyMismatchError(ContextError):
    """Objects of two different strategies were mixed.

    A scope was entered inside another strategy's scope, or a variable was used in the scope of a
    strategy that did not create it.
    """


# -- replicas that disagree ---------------------------------------------------------------------


class MergeMismatchError(PhalanxError, RuntimeError):
    """Replicas met at merge points that do not belong together.

    One replica called `merge_call` (or a collective, or an aggregated variable update) more often
    than another, in another order, or of another kind. The message names both call
    sites. Usually a Python branch on the replica id surrounds a collective: compute inside the
    branch, communicate outside it.
    """


class CollectiveMismatchError(MergeMismatchError):
    """Workers came to programs that do not belong together.

    All workers must run the same programs in the same order, with arrays of the same shapes and dtypes.
    The message is the same on every worker and shows what each of them was about to run, and where.
    Usually a Python branch on the worker's id surrounds a collective, or one worker ran out of data.
    """


class StructureMismatchError(PhalanxError, AssertionError):
    """Replicas returned, or merged, nests of different structure."""


class DivergenceError(PhalanxError, ValueError):
    """Replicas tried to write different values into a variable that mirrors one value.

    Choose an aggregation (SUM, MEAN, ONLY_FIRST_REPLICA) for the variable, or create it with
    ``synchronization=ON_READ`` if every replica is meant to keep a value of its own.
    """


# -- arguments ----------------------------------------------------------------------------------


class InvalidValueError(PhalanxError, ValueError):
    """An argument has the right type but a value that cannot work."""


class NoReplicaContextError(ContextError, AttributeError):
    """A method that belongs on replicas was called across them.

    Also an `AttributeError`, as in TensorFlow, where there is no replica context to ask.
    """


class InvalidTypeError(PhalanxError, TypeError):
    """An argument has a type that cannot work."""


class InvalidReduceOpError(InvalidTypeError, AssertionError):
    """The reduction is neither a `ReduceOp` nor its name."""


class MirroredReductionError(PhalanxError, AssertionError):
    """A sum was asked of a value that is the same on all replicas by construction."""


class InvalidDestinationError(InvalidTypeError, InvalidValueError, AssertionError, AttributeError):
    """The destination of a reduction or broadcast is not a device, a value or a variable."""


class DuplicateDeviceError(InvalidValueError, AssertionError):
    """A device was listed twice. Each replica needs a device of its own."""


class RemoteDeviceError(InvalidValueError, RuntimeError):
    """A device of another task was named where only local ones can be used."""


class FrozenDevicesError(InvalidValueError, RuntimeError):
    """The number of devices was changed after JAX had started."""


class NoTPUError(InvalidValueError, IndexError):
    """There is no TPU in this process."""


class ForeignVariableError(InvalidValueError, AssertionError):
    """A variable was given to a strategy that did not create it."""


class ClusterEnvironmentError(PhalanxError, RuntimeError, AssertionError):
    """The surroundings do not say, or do not have, what a cluster resolver needs.

    For example a variable of Slurm is missing, a pod is not running, or a TPU is not ready yet. The
    message says what was looked for and how the program is meant to be started.
    """


class VersionMismatchError(ClusterEnvironmentError):
    """The workers of a job run different versions of Phalanx or JAX. Install the same everywhere."""


class InvalidKeyError(PhalanxError, KeyError):
    """A dictionary of options has a key that means nothing, or lacks one that is needed."""


class InvalidOptionsError(InvalidValueError, RuntimeError):
    """Options do not go together. The message names all of them."""


class DuplicateTaskError(InvalidValueError, KeyError):
    """Two descriptions of a cluster give the same task, and both cannot be right."""

    __str__ = Exception.__str__  # a KeyError would show the message in quotes


class MissingPackageError(PhalanxError, ImportError, RuntimeError):
    """An optional package is needed and not installed. The message says what to install."""


class UnbatchedDatasetError(InvalidValueError, IndexError):
    """A dataset was distributed over several replicas whose elements are no batches.

    Also an `IndexError`, which is what TensorFlow's implementation ends in.
    """


class UnsupportedError(PhalanxError, NotImplementedError):
    """The combination asked for has no meaning; the message says what to use instead."""


class DatasetFunctionError(PhalanxError, RuntimeError):
    """A function given to a dataset (to `map`, `filter`, `from_generator` …) failed.

    The message names the operation and the element. The function's own exception is the `__cause__`.
    """


# -- the status codes that ported code catches (`tf.errors.X` is `px.errors.X`) -----------------


class OpError(PhalanxError):
    """Base of the errors named after TensorFlow's status codes."""


class CancelledError(OpError):
    """The operation was cancelled before it finished."""


class UnknownError(OpError):
    """An error without a better class, for example from another process."""


class InvalidArgumentError(OpError, ValueError):
    """Arrays do not fit together: shapes, dtypes or ranks differ where they must agree."""


class InvalidOperandError(InvalidTypeError, InvalidArgumentError, AttributeError):
    """A value that is no array was given where arrays are communicated.

    TensorFlow's implementation ends in an `AttributeError`, in its `InvalidArgumentError` or in a
    `TypeError`, as the value is a string, an array of strings, or summed along a dimension.
    """


class DeadlineExceededError(OpError, TimeoutError):
    """A wait reached its deadline. The message names who was missing and where they were."""


class NotFoundError(OpError, LookupError):
    """Something that was asked for by name does not exist."""


class AlreadyExistsError(OpError):
    """Something that should be created exists already."""


class PermissionDeniedError(OpError, PermissionError):
    """The caller is not allowed to do this."""


class UnauthenticatedError(OpError, PermissionError):
    """The caller did not show a valid token."""


class ResourceExhaustedError(OpError):
    """Memory, queue space or another resource has run out."""


class FailedPreconditionError(OpError, RuntimeError):
    """The system is not in the state that the operation needs."""


class AbortedError(OpError):
    """The operation was stopped part-way, usually because a peer failed."""


class ClosureInputError(AbortedError, ValueError):
    """A scheduled function was given something that could not be made.

    For example the value of another function, which has failed, or a dataset that could not be made on
    its worker. The message says why.
    """


class OutOfRangeError(OpError, IndexError):
    """The end of the input was reached."""


class UnimplementedError(OpError, NotImplementedError):
    """The operation does not exist on this platform."""


class InternalError(OpError):
    """A broken invariant inside Phalanx. Please report it."""


class UnavailableError(OpError, ConnectionError):
    """A peer cannot be reached, or died."""


class DataLossError(OpError):
    """Stored data is corrupt or truncated."""


# -- jobs of several workers ----------------------------------------------------------------------


class WorkerLostError(UnavailableError):
    """Another worker died, or left while it was still needed. The message names it and where it was."""


class WorkerFailedError(AbortedError, RuntimeError):
    """Another worker raised an exception. The message has its traceback: look there for the mistake."""


class ServerStateLostError(UnavailableError):
    """A parameter server runs, but does not hold the variables of this run any more.

    Its process was restarted and kept nothing, or it serves another run now. Waiting does not help. Let
    servers keep what they hold by ``durability="log"``, or begin anew from a checkpoint.
    """


class HubLostError(UnavailableError):
    """The connection to the job's hub broke.

    The hub runs in the launcher, or next to the first worker. Usually that machine is down or the whole
    job was stopped.
    """
