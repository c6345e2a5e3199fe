"""Names of TensorFlow, what they are called here, and what is different."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NAMES", "Name", "counterpart", "table"]


@dataclass(frozen=True)
class Name:
    """A name of TensorFlow, what to write instead, and what is different, or why there is nothing.

    `ours` begins with px, jnp, jax, optax or np; None if there is no counterpart.
    """

    theirs: str
    ours: str | None
    note: str = ""


def _same(theirs: str, ours: str, names: str, note: str = "") -> list[Name]:
    return [Name(f"{theirs}.{name}", f"{ours}.{name}", note) for name in names.split()]


def _none(theirs: str, names: str, reason: str) -> list[Name]:
    return [Name(f"{theirs}.{name}", None, reason) for name in names.split()]


def _arrays(theirs: str, pairs: str) -> list[Name]:
    listed = (pair.split(":") for pair in pairs.split())
    return [Name(f"{theirs}.{name}", f"jnp.{ours}") for name, ours in listed]


_ARRAYS = """
reduce_sum:sum reduce_mean:mean reduce_max:max reduce_min:min reduce_prod:prod reduce_all:all
reduce_any:any matmul:matmul tensordot:tensordot einsum:einsum add:add subtract:subtract
multiply:multiply divide:divide square:square sqrt:sqrt exp:exp abs:abs sign:sign pow:power
maximum:maximum minimum:minimum tanh:tanh sin:sin cos:cos round:round equal:equal not_equal:not_equal
greater:greater less:less where:where zeros:zeros ones:ones zeros_like:zeros_like ones_like:ones_like
fill:full eye:eye linspace:linspace range:arange reshape:reshape transpose:transpose concat:concatenate
stack:stack expand_dims:expand_dims squeeze:squeeze tile:tile repeat:repeat pad:pad argmax:argmax
argmin:argmin shape:shape size:size cumsum:cumsum sort:sort argsort:argsort clip_by_value:clip
identity:asarray constant:asarray convert_to_tensor:asarray cast:asarray bool:bool_
logical_and:logical_and logical_or:logical_or logical_not:logical_not newaxis:newaxis
"""
_MATH = """
reduce_sum:sum reduce_mean:mean log:log exp:exp sqrt:sqrt square:square add:add multiply:multiply
divide:divide equal:equal argmax:argmax abs:abs tanh:tanh reduce_std:std reduce_variance:var
is_nan:isnan
"""
_SERVICE = "there is no service for input; each worker reads its own"
_V1 = "sessions and graphs do not exist here"

NAMES: list[Name] = [
    # -- tf.distribute
    *_same(
        "tf.distribute",
        "px",
        "CrossDeviceOps HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode "
        "MirroredStrategy MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy "
        "ParameterServerStrategy ReduceOp ReductionToOneDevice "
        "ReplicaContext RunOptions Server Strategy "
        "StrategyExtended TPUStrategy DistributedDataset DistributedIterator DistributedValues "
        "cluster_resolver coordinator experimental_set_strategy get_replica_context get_strategy "
        "has_strategy in_cross_replica_context",
    ),
    *_same(
        "tf.distribute.experimental",
        "px.experimental",
        "CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation "
        "CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy TPUStrategy "
        "ValueContext coordinator partitioners rpc",
    ),
    *_none(
        "tf.distribute.experimental",
        "PreemptionCheckpointHandler PreemptionWatcher TerminationConfig",
        "phalanx run --restarts starts a job again, from its last checkpoint",
    ),
    *_none("tf.distribute", "experimental.WatchDog", "every wait has a deadline (PHALANX_DEADLINE)"),
    # -- tf.data
    *_same(
        "tf.data",
        "px.data",
        "AUTOTUNE Dataset FixedLengthRecordDataset "
        "INFINITE_CARDINALITY Iterator Options TFRecordDataset "
        "TextLineDataset UNKNOWN_CARDINALITY",
    ),
    *_same(
        "tf.data.Dataset",
        "px.data.Dataset",
        "apply as_numpy_iterator batch "
        "bucket_by_sequence_length cache cardinality choose_from_datasets "
        "concatenate element_spec enumerate filter flat_map from_generator from_tensor_slices "
        "from_tensors get_single_element interleave list_files load map options padded_batch prefetch "
        "ragged_batch random range rebatch reduce repeat sample_from_datasets save scan shard shuffle "
        "skip take take_while unbatch window with_options zip",
        "elements are NumPy arrays; functions are called as Python, and not traced",
    ),
    *_none(
        "tf.data.Dataset",
        "group_by_window rejection_resample snapshot sparse_batch unique fingerprint",
        "write it as a generator and use from_generator",
    ),
    *_same(
        "tf.data.experimental",
        "px.data.experimental",
        "AUTOTUNE AutoShardPolicy CsvDataset DistributeOptions INFINITE_CARDINALITY "
        "UNKNOWN_CARDINALITY assert_cardinality cardinality",
    ),
    *_none("tf.data.experimental", "service OptimizationOptions ThreadingOptions", _SERVICE),
    Name("tf.data.DatasetSpec", "px.data.DatasetSpec"),
    # -- tf.function and gradients
    Name("tf.function", "px.function", "control flow on array values needs jax.lax, not Python"),
    Name("tf.TensorSpec", "px.TensorSpec"),
    Name("tf.GradientTape", "px.value_and_grad", "the loss becomes a function; see the guide"),
    Name("tf.gradients", "px.grad", "takes a function in place of a result"),
    Name("tf.stop_gradient", "jax.lax.stop_gradient"),
    Name("tf.custom_gradient", "jax.custom_vjp", "write forward and backward with defvjp"),
    Name("tf.autograph", None, "Python control flow is not rewritten: use jax.lax.cond and scan"),
    Name("tf.py_function", None, "use jax.pure_callback, with the shape of the result"),
    Name("tf.numpy_function", None, "use jax.pure_callback, with the shape of the result"),
    Name("tf.config.run_functions_eagerly", None, "leave out px.function to run eagerly"),
    # -- variables, modules and what surrounds training
    *_same(
        "tf",
        "px",
        "IndexedSlices Module Variable VariableAggregation VariableSynchronization name_scope",
    ),
    *_same(
        "tf.config",
        "px.config",
        "LogicalDevice LogicalDeviceConfiguration PhysicalDevice get_logical_device_configuration "
        "get_visible_devices list_logical_devices list_physical_devices "
        "set_logical_device_configuration set_visible_devices",
    ),
    Name("tf.config.experimental.set_memory_growth", None, "set XLA_PYTHON_CLIENT_PREALLOCATE=false"),
    *_same(
        "tf.errors", "px.errors", "InvalidArgumentError NotFoundError OutOfRangeError UnavailableError"
    ),
    *_same(
        "tf.io",
        "px.io",
        "FixedLenFeature FixedLenSequenceFeature TFRecordOptions "
        "TFRecordWriter VarLenFeature decode_raw "
        "parse_example parse_single_example",
    ),
    *_same("tf.nn", "px.nn", "compute_average_loss embedding_lookup scale_regularization_loss"),
    *_same(
        "tf.summary",
        "px.summary",
        "SummaryWriter create_file_writer create_noop_writer flush histogram image record_if scalar "
        "should_record_summaries text",
    ),
    Name("tf.summary.experimental.set_step", "px.summary.set_step"),
    Name("tf.summary.experimental.get_step", "px.summary.get_step"),
    Name("tf.summary.audio", None, "only numbers, images, histograms and texts are written"),
    *_same(
        "tf.train",
        "px.train",
        "BytesList Checkpoint CheckpointManager ClusterDef "
        "ClusterSpec Example Feature Features FloatList "
        "Int64List JobDef ServerDef checkpoints_iterator latest_checkpoint list_variables",
    ),
    Name("tf.random.set_seed", "px.random.set_seed", "rules shuffles and px.random.next_key"),
    # -- Keras's metrics, losses and optimizers, in loops of one's own
    *_same(
        "tf.keras.metrics",
        "px.metrics",
        "AUC Accuracy BinaryAccuracy BinaryCrossentropy CategoricalAccuracy CategoricalCrossentropy "
        "CosineSimilarity FalseNegatives FalsePositives Mean MeanAbsoluteError MeanIoU "
        "MeanMetricWrapper MeanSquaredError Metric Precision Recall RootMeanSquaredError "
        "SparseCategoricalAccuracy SparseCategoricalCrossentropy SparseTopKCategoricalAccuracy Sum "
        "TopKCategoricalAccuracy TrueNegatives TruePositives",
        "in a replica the result is that of the replica",
    ),
    *_same(
        "tf.keras.losses",
        "px.losses",
        "BinaryCrossentropy CategoricalCrossentropy CategoricalHinge CosineSimilarity Hinge Huber "
        "KLDivergence LogCosh Loss MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError "
        "MeanSquaredLogarithmicError Poisson Reduction SparseCategoricalCrossentropy SquaredHinge "
        "binary_crossentropy categorical_crossentropy mean_absolute_error mean_squared_error "
        "sparse_categorical_crossentropy",
    ),
    *_same("tf.keras.optimizers", "px.optimizers", "Adagrad Adam AdamW RMSprop SGD schedules"),
    Name("tf.math.confusion_matrix", "px.metrics.confusion_matrix"),
    # -- arrays
    *_arrays("tf", _ARRAYS),
    *_same(
        "tf", "jnp", "bfloat16 complex64 float16 float32 float64 int16 int32 int64 int8 uint32 uint8"
    ),
    *_arrays("tf.math", _MATH),
    *_same(
        "tf.nn", "jax.nn", "elu gelu leaky_relu log_softmax relu sigmoid silu softmax softplus tanh"
    ),
    Name("tf.sigmoid", "jax.nn.sigmoid"),
    Name("tf.one_hot", "jax.nn.one_hot"),
    Name("tf.Tensor", "jax.Array"),
    Name("tf.norm", "jnp.linalg.norm"),
    Name(
        "tf.nn.sparse_softmax_cross_entropy_with_logits",
        "optax.softmax_cross_entropy_with_integer_labels",
    ),
    Name("tf.nn.softmax_cross_entropy_with_logits", "optax.softmax_cross_entropy"),
    Name("tf.nn.sigmoid_cross_entropy_with_logits", "optax.sigmoid_binary_cross_entropy"),
    Name("tf.random.normal", "jax.random.normal", "takes a key first: px.random.next_key()"),
    Name("tf.random.uniform", "jax.random.uniform", "takes a key first: px.random.next_key()"),
    Name("tf.print", None, "use jax.debug.print, with a format string"),
    Name("tf.cond", None, "use jax.lax.cond, whose branches take arguments"),
    Name("tf.while_loop", None, "use jax.lax.while_loop, with one value for the state"),
    Name("tf.device", None, "strategies place things; name devices when you make them"),
    Name("tf.control_dependencies", None, "code runs in the order in which it is written"),
    Name("tf.Session", None, _V1),
    Name("tf.placeholder", None, _V1),
    Name("tf.compat", None, _V1),
    Name("tf.estimator", None, "write the loop, or use Keras"),
    Name("tf.saved_model", None, "save weights with px.train.Checkpoint, programs with jax.export"),
]

_BY_NAME = {name.theirs: name for name in NAMES}

PREFIXES = {
    "tf.distribute.cluster_resolver": "px.cluster_resolver",
    "tf.distribute.coordinator": "px.coordinator",
    "tf.distribute.experimental.partitioners": "px.partitioners",
    "tf.distribute.experimental.coordinator": "px.coordinator",
    "tf.keras.optimizers.schedules": "px.optimizers.schedules",
    "tf.keras.optimizers.legacy": "px.optimizers",
}
"""Modules whose names are the same here."""


def counterpart(theirs: str) -> tuple[Name | None, str]:
    """What is known of a dotted name or its longest known beginning, and what follows that.

    >>> known, rest = counterpart("tf.distribute.ReduceOp.SUM")
    >>> known.ours, rest
    ('px.ReduceOp', '.SUM')
    """
    parts = theirs.split(".")
    for count in range(len(parts), 1, -1):
        start = ".".join(parts[:count])
        rest = "".join(f".{part}" for part in parts[count:])
        if start in PREFIXES:
            return Name(start, PREFIXES[start]), rest
        if start in _BY_NAME:
            return _BY_NAME[start], rest
    return None, ""


def table() -> str:
    """All names as tables in Markdown."""
    groups: dict[str, list[Name]] = {}
    for name in NAMES:
        head = name.theirs.split(".")[1]
        known = {"distribute": "tf.distribute", "data": "tf.data", "keras": "tf.keras"}
        groups.setdefault(known.get(head, "Others"), []).append(name)
    lines = ["# Names of TensorFlow", "", "`phalanx port --table` prints this page.", ""]
    for group, names in groups.items():
        lines += [f"## {group}", "", "| TensorFlow | Phalanx | Differences |", "|---|---|---|"]
        for name in names:
            ours = f"`{name.ours}`" if name.ours else "none"
            lines.append(f"| `{name.theirs}` | {ours} | {name.note} |")
        lines.append("")
    return "\n".join(lines)
