"""Names of TensorFlow, what they are called here, and what is different."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NAMES", "Name", "counterpart", "table", "tensorflow_names"]


@dataclass(frozen=True)
class Name:
    """A name of TensorFlow, what to write instead, and what is different, or why there is nothing.

    `ours` begins with px, jnp, jax, optax, np, keras or a module of Python; None if there is no
    counterpart. `always` is for names of Keras that are replaced even in programs that call `fit`.
    """

    theirs: str
    ours: str | None
    note: str = ""
    always: bool = False


def _same(theirs: str, ours: str, names: str, note: str = "") -> list[Name]:
    return [Name(f"{theirs}.{name}", f"{ours}.{name}", note) for name in names.split()]


def _none(theirs: str, names: str, reason: str) -> list[Name]:
    return [Name(f"{theirs}.{name}", None, reason) for name in names.split()]


def _dataset_classes(names: str, reason: str) -> list[Name]:
    """Methods that no kind of dataset has."""
    kinds = ["Dataset", "FixedLengthRecordDataset", "TFRecordDataset", "TextLineDataset"]
    kinds.append("experimental.CsvDataset")
    return [one for kind in kinds for one in _none(f"tf.data.{kind}", names, reason)]


def _gfiles(ours: str, names: str) -> list[Name]:
    return [Name(f"tf.io.gfile.{name}", f"{ours}.{name}") for name in names.split()]


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
is_nan:isnan is_finite:isfinite is_inf:isinf floor:floor ceil:ceil log1p:log1p expm1:expm1
"""
_SERVICE = "there is no service for input; each worker reads its own"
_V1 = "sessions and graphs do not exist here"

_METHOD = "used with Dataset.apply in TensorFlow; call the method of Dataset with this name"
_GRAPH = "describes graphs of TensorFlow"
_SETTING = "there is nothing to set: refused by px.data.Options"

NAMES: list[Name] = [
    # -- tf.distribute
    *_same(
        "tf.distribute",
        "px",
        "CrossDeviceOps HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode "
        "MirroredStrategy MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy "
        "ParameterServerStrategy ReduceOp ReductionToOneDevice "
        "ReplicaContext Server Strategy "
        "StrategyExtended DistributedDataset DistributedIterator DistributedValues "
        "cluster_resolver coordinator experimental_set_strategy get_replica_context get_strategy "
        "has_strategy in_cross_replica_context",
    ),
    Name("tf.distribute.RunOptions", "px.RunOptions", "accepted, without effect"),
    Name("tf.distribute.TPUStrategy", "px.TPUStrategy", "JAX finds the TPU; not yet tried on one"),
    *_none(
        "tf.distribute.TPUStrategy",
        "experimental_assign_to_logical_device experimental_replicate_to_logical_devices "
        "experimental_split_to_logical_devices",
        "a replica is one device; px.AutoParallelStrategy and px.parallel lay arrays out over several",
    ),
    Name(
        "tf.distribute.cluster_resolver.TPUClusterResolver.set_tpu_topology",
        None,
        "JAX finds the topology of a TPU",
    ),
    *_same(
        "tf.distribute.experimental",
        "px.experimental",
        "CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation "
        "CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy "
        "PreemptionCheckpointHandler TPUStrategy TerminationConfig "
        "ValueContext coordinator partitioners rpc",
    ),
    Name(
        "tf.distribute.experimental.PreemptionWatcher",
        None,
        "px.experimental.PreemptionCheckpointHandler watches",
    ),
    *_none("tf.distribute", "experimental.WatchDog", "every wait has a deadline (PHALANX_DEADLINE)"),
    Name("tf.types.experimental.distributed.PerReplica", "px.PerReplica"),
    Name("tf.types.experimental.distributed.Mirrored", "px.Mirrored"),
    # -- tf.data
    *_same(
        "tf.data",
        "px.data",
        "AUTOTUNE FixedLengthRecordDataset INFINITE_CARDINALITY Options TFRecordDataset "
        "TextLineDataset UNKNOWN_CARDINALITY",
    ),
    Name(
        "tf.data.Dataset",
        "px.data.Dataset",
        "elements are NumPy arrays; functions are called as Python, and not traced",
    ),
    Name("tf.data.Iterator", "px.data.Iterator", "make it with iter(dataset)"),
    *_none("tf.data.Iterator", "element_spec", "ask the dataset"),
    *_none("tf.data.Iterator", "get_next_as_optional", "use next(iterator, None)"),
    Name("tf.data.NumpyIterator", "px.data.Iterator", "elements are NumPy arrays anyway"),
    *_none("tf.data.NumpyIterator", "next", "use next(iterator)"),
    Name("tf.data.NumpyIterator.save", "px.data.Iterator.state", "returns the position"),
    *_dataset_classes(
        "counter sparse_batch fingerprint",
        "write it as a generator and use from_generator",
    ),
    *_none(
        "tf.data.Options",
        "autotune dataset_name experimental_external_state_policy experimental_optimization "
        "experimental_service experimental_slack experimental_symbolic_checkpoint "
        "experimental_threading experimental_warm_start framework_type threading",
        _SETTING,
    ),
    *_none("tf.data", "ThreadingOptions", _SETTING),
    Name("tf.data.DatasetSpec", "px.data.DatasetSpec"),
    *_none(
        "tf.data.DatasetSpec",
        "cast experimental_as_proto experimental_from_proto experimental_type_proto flatten "
        "from_tensors from_value is_compatible_with is_subtype_of most_specific_common_supertype "
        "most_specific_compatible_type placeholder_value to_tensors value_type",
        _GRAPH,
    ),
    *_none("tf.data", "IteratorSpec", _GRAPH),
    *_same(
        "tf.data.experimental",
        "px.data.experimental",
        "AUTOTUNE AutoShardPolicy CsvDataset DistributeOptions INFINITE_CARDINALITY SHARD_HINT "
        "UNKNOWN_CARDINALITY assert_cardinality cardinality",
    ),
    Name("tf.data.experimental.Optional", "px.experimental.Optional"),
    Name("tf.data.experimental.choose_from_datasets", "px.data.Dataset.choose_from_datasets"),
    Name("tf.data.experimental.sample_from_datasets", "px.data.Dataset.sample_from_datasets"),
    Name("tf.data.experimental.load", "px.data.Dataset.load"),
    Name("tf.data.experimental.RandomDataset", None, "px.data.Dataset.random(seed=…)"),
    *_none(
        "tf.data.experimental",
        "bucket_by_sequence_length dense_to_ragged_batch enumerate_dataset get_single_element "
        "group_by_window ignore_errors rejection_resample save scan snapshot take_while unbatch unique",
        f"{_METHOD} (dense_to_ragged_batch: ragged_batch; enumerate_dataset: enumerate)",
    ),
    *_none("tf.data.experimental", "shuffle_and_repeat", "write .shuffle(…).repeat(…)"),
    *_none("tf.data.experimental", "map_and_batch", "write .map(…).batch(…)"),
    *_none("tf.data.experimental", "parallel_interleave", "write .interleave(…)"),
    *_none("tf.data.experimental", "get_next_as_optional", "use next(iterator, None)"),
    *_none("tf.data.experimental", "get_structure", "ask dataset.element_spec"),
    *_none("tf.data.experimental", "Counter", "px.data.Dataset.range, with a large number"),
    *_none(
        "tf.data.experimental", "from_list", "px.data.Dataset.from_tensor_slices, or from_generator"
    ),
    *_none("tf.data.experimental", "at", "dataset.skip(index).get_single_element(), or index arrays"),
    *_none(
        "tf.data.experimental",
        "copy_to_device prefetch_to_device",
        "distributed datasets bring batches to the devices by themselves",
    ),
    *_none(
        "tf.data.experimental",
        "make_csv_dataset make_batched_features_dataset parse_example_dataset",
        "px.data.CsvDataset, or TFRecordDataset and .map(px.io.parse_example)",
    ),
    *_none(
        "tf.data.experimental",
        "DatasetInitializer Reducer SqlDataset dense_to_sparse_batch group_by_reducer "
        "index_table_from_dataset pad_to_cardinality table_from_dataset",
        "write it as a generator and use from_generator",
    ),
    Name(
        "tf.data.experimental.TFRecordWriter",
        None,
        "px.io.TFRecordWriter writes records one by one; or dataset.save",
    ),
    *_none("tf.data.experimental", "distributed_save", "dataset.save, on one worker"),
    *_none("tf.data.experimental", "make_saveable_from_iterator", "px.train.Checkpoint(iterator=…)"),
    *_none("tf.data.experimental", "enable_debug_mode", "functions are called as Python always"),
    *_none("tf.data.experimental", "from_variant to_variant get_model_proto", _GRAPH),
    *_none(
        "tf.data.experimental",
        "AutotuneAlgorithm AutotuneOptions ExternalStatePolicy OptimizationOptions ThreadingOptions",
        _SETTING,
    ),
    *_none("tf.data.experimental", "service ServiceOptions", _SERVICE),
    # -- compiled functions
    Name("tf.types.experimental.PolymorphicFunction", "px.Function", "what px.function gives"),
    *_none(
        "tf.types.experimental.PolymorphicFunction",
        "get_concrete_function function_type experimental_get_compiler_ir",
        "Function.lower(*args) has the program, Function.trace_count the number of programs",
    ),
    *_none("tf.types.experimental", "ConcreteFunction", "Function.lower(*args) has the program"),
    # -- tf.function and gradients
    Name(
        "tf.function",
        "px.function",
        "control flow on array values needs jax.lax, not Python; of its arguments only input_signature",
    ),
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
    # -- files, which are those of the machine
    Name("tf.io.gfile.GFile", "open"),
    *_gfiles("os.path", "exists isdir join"),
    *_gfiles("os", "listdir remove rename stat walk"),
    Name("tf.io.gfile.glob", "glob.glob"),
    Name("tf.io.gfile.rmtree", "shutil.rmtree"),
    Name("tf.io.gfile.makedirs", "os.makedirs", "phalanx port adds exist_ok=True"),
    Name("tf.io.gfile.mkdir", "os.makedirs", "phalanx port adds exist_ok=True"),
    Name("tf.io.gfile", None, "files of the machine: os, shutil and glob of Python"),
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
        "MeanSquaredLogarithmicError Poisson SparseCategoricalCrossentropy SquaredHinge "
        "binary_crossentropy categorical_crossentropy mean_absolute_error mean_squared_error "
        "sparse_categorical_crossentropy",
    ),
    *_same("tf.keras.optimizers", "px.optimizers", "Adagrad Adam AdamW RMSprop SGD schedules"),
    Name("tf.math.confusion_matrix", "px.metrics.confusion_matrix"),
    Name(
        "tf.keras.losses.Reduction",
        "px.losses.Reduction",
        "strings, which Keras takes, too; it has no AUTO",
        True,
    ),
    Name("tf.keras.utils.experimental.DatasetCreator", "px.keras.DatasetCreator", "", True),
    *_none("tf.keras", "estimator", "px.estimator.Estimator takes a model function"),
    # -- arrays
    *_arrays("tf", _ARRAYS),
    *_same(
        "tf", "jnp", "bfloat16 complex64 float16 float32 float64 int16 int32 int64 int8 uint32 uint8"
    ),
    *_arrays("tf.math", " ".join(dict.fromkeys((_ARRAYS + _MATH).split()))),
    Name("tf.math.rsqrt", "jax.lax.rsqrt"),
    Name("tf.math.top_k", "jax.lax.top_k"),
    Name("tf.math.reduce_logsumexp", "jax.nn.logsumexp"),
    *_same("tf.math", "jax.nn", "sigmoid softplus"),
    Name("tf.math.l2_normalize", None, "x / jnp.linalg.norm(x, axis=…, keepdims=True)"),
    *_same(
        "tf.nn", "jax.nn", "elu gelu leaky_relu log_softmax relu sigmoid silu softmax softplus tanh"
    ),
    Name("tf.sigmoid", "jax.nn.sigmoid"),
    Name("tf.one_hot", "jax.nn.one_hot"),
    Name("tf.gather", "jnp.take", "phalanx port adds axis=0"),
    Name("tf.Tensor", "jax.Array"),
    Name("tf.TensorShape", "tuple", "takes no None"),
    Name("tf.add_n", "sum"),
    Name("tf.__version__", "px.__version__", "the version of Phalanx"),
    Name("tf.norm", "jnp.linalg.norm"),
    Name(
        "tf.nn.sparse_softmax_cross_entropy_with_logits",
        "optax.softmax_cross_entropy_with_integer_labels",
    ),
    Name("tf.nn.softmax_cross_entropy_with_logits", "optax.softmax_cross_entropy"),
    Name("tf.nn.sigmoid_cross_entropy_with_logits", "optax.sigmoid_binary_cross_entropy"),
    Name("tf.random.normal", "jax.random.normal", "takes a key first: px.random.next_key()"),
    Name("tf.random.uniform", "jax.random.uniform", "takes a key first: px.random.next_key()"),
    Name("tf.cond", None, "use jax.lax.cond, whose branches take arguments"),
    Name("tf.while_loop", None, "use jax.lax.while_loop, with one value for the state"),
    Name("tf.device", None, "strategies place things; name devices when you make them"),
    Name("tf.control_dependencies", None, "code runs in the order in which it is written"),
    Name("tf.Session", None, _V1),
    Name("tf.placeholder", None, _V1),
    Name("tf.compat", None, _V1),
    *_same(
        "tf.estimator",
        "px.estimator",
        "Estimator EstimatorSpec EvalSpec ModeKeys RunConfig TrainSpec train_and_evaluate",
    ),
    Name("tf.estimator", None, "only Estimator, its specs and train_and_evaluate: px.estimator"),
    Name(
        "tf.print",
        "jax.debug.print",
        "phalanx port writes a format string; other arguments than values are left out",
    ),
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
    "tf.keras.optimizers.experimental": "px.optimizers",
    "tf.keras.callbacks.experimental": "keras.callbacks",
    "tf.dtypes": "jnp",
    "tf.keras.layers.experimental.preprocessing": "keras.layers",
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


def tensorflow_names() -> list[str]:
    """Every name of `tf.distribute`, `tf.data` and `tf.function`, as TensorFlow exports them."""
    text = (Path(__file__).parent / "tensorflow_names.txt").read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def _rows(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """A row for each name; members that a class here has by the same name share a row."""
    rows: list[tuple[str, str, str]] = []
    members: dict[str, list[str]] = {}
    for theirs in names:
        known, rest = counterpart(theirs)
        if known is None:
            raise LookupError(f"The table has no row for {theirs}")
        owner, _, member = theirs.rpartition(".")
        if rest and known.ours and rest == f".{member}" and known.theirs == owner:
            members.setdefault(owner, []).append(member)
            continue
        if rest and known.ours is None:
            continue  # the row of what it belongs to says why
        ours = "none" if known.ours is None else f"`{known.ours}{rest}`"
        rows.append((f"`{theirs}`", ours, known.note))
    for owner, listed in members.items():
        known, _ = counterpart(owner)
        assert known is not None
        texts = ", ".join(f"`.{name}`" for name in listed)
        rows.append((f"`{owner}`: {texts}", f"the same of `{known.ours}`", ""))
    return sorted(rows)


def table() -> str:
    """All names as tables in Markdown."""
    groups: dict[str, list[str]] = {}
    known = {"distribute": "tf.distribute", "data": "tf.data", "keras": "tf.keras"}
    known |= {"function": "tf.function", "types": "tf.types"}
    for theirs in sorted({*tensorflow_names(), *(name.theirs for name in NAMES)}):
        groups.setdefault(known.get(theirs.split(".")[1], "Others"), []).append(theirs)
    lines = [
        "# Names of TensorFlow",
        "",
        "Every name of `tf.distribute`, `tf.data` and `tf.function` in TensorFlow 2.21, and others",
        "that programs use. How names behave differently is in [Differences](../differences.md).",
        "`phalanx port --table` prints this page.",
        "",
    ]
    for group in ("tf.distribute", "tf.data", "tf.function", "tf.types", "tf.keras", "Others"):
        lines += [f"## {group}", "", "| TensorFlow | Phalanx | Differences |", "|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in _rows(groups[group])]
        lines.append("")
    return "\n".join(lines)
