"""What of Keras is not public, and which versions have it: the one file to change when Keras moves it.

Keras has no hook for those who distribute models: `fit` makes its programs itself, and runs long
after the scope in which a model was made. So the first base of `keras.Model`, which is Keras's trainer,
gets a subclass. Models outside of scopes run Keras's code unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from phalanx.errors import InvalidValueError, MissingPackageError, PhalanxError, UnsupportedError

OLDEST, NEWEST = (3, 12), (3, 15)
"""The versions of Keras that are tested: the first and the last minor version."""

VERSIONS = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)

_NEEDED = {
    "keras.src.backend.jax.trainer": ("JAXTrainer",),
    "keras.src.trainers.data_adapters": ("get_data_adapter",),
    "keras.src.trainers.data_adapters.data_adapter": ("DataAdapter",),
    "keras.src.trainers.data_adapters.data_adapter_utils": (
        "class_weight_to_sample_weights",
        "unpack_x_y_sample_weight",
    ),
    "keras.src.trainers.data_adapters.array_slicing": ("train_validation_split",),
}
# Methods that trainer.py overrides, or that are called here.
_METHODS = ("_get_jax_state", "jax_state_sync", "_symbolic_build", "make_train_function")


_WEIGHTS = ("trainable_variables", "non_trainable_variables")
PARTS = {
    "train_step": (*_WEIGHTS, "optimizer_variables", "metrics_variables"),
    "test_step": (*_WEIGHTS, "metrics_variables"),
    "predict_step": _WEIGHTS,
}
"""The parts of the state that each step of Keras takes and returns."""


def problem() -> PhalanxError | None:
    """Why models of the installed Keras cannot be distributed; None if they can be."""
    import keras

    version = _version()
    found = ".".join(map(str, version))
    if not OLDEST <= version[:2] <= NEWEST:
        return UnsupportedError(
            f"Phalanx distributes models of Keras {VERSIONS}; other versions differ in parts that it "
            f"must change. Install one of these: pip install 'phalanx[keras]'. Received: Keras {found}"
        )
    if keras.config.backend() != "jax":
        return InvalidValueError(
            "Strategies need Keras on JAX. Set the environment variable KERAS_BACKEND=jax before Keras "
            f"is imported. Received: Keras with the backend {keras.config.backend()!r}"
        )
    missing = _missing()
    if missing:
        return UnsupportedError(
            f"This build of Keras has moved parts that Phalanx must change. Install another of the "
            f"versions {VERSIONS}. Received: Keras {found} without {', '.join(missing)}"
        )
    return None


def _version() -> tuple[int, ...]:
    import keras

    return tuple(int(part) for part in keras.__version__.split(".")[:3] if part.isdigit())


def _missing() -> list[str]:
    missing = []
    for module, names in _NEEDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            missing.append(module)
            continue
        missing += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    if not missing:
        missing += [f"JAXTrainer.{name}" for name in _METHODS if not hasattr(trainer(), name)]
    return missing


def require() -> None:
    """Import Keras, on JAX if nothing else is said, and raise if its models cannot be distributed."""
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "jax")
    try:
        importlib.import_module("keras")
    except ImportError as error:
        if error.name != "keras":
            raise
        raise MissingPackageError(
            "px.keras needs Keras 3. Install it: pip install 'phalanx[keras]'"
        ) from None
    found = problem()
    if found is not None:
        raise found


# -- models ---------------------------------------------------------------------------------------


def trainer() -> type[Any]:
    """The class that trains models on JAX."""
    return importlib.import_module("keras.src.backend.jax.trainer").JAXTrainer


def put_trainer(make: Callable[[type[Any]], type[Any]]) -> None:
    """Let all models, also those that exist, have another trainer, which is made from Keras's own."""
    import keras

    first, *others = keras.Model.__bases__
    keras.Model.__bases__ = (make(first), *others)


def put_layer_call(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let calls of layers and models go through another function."""
    import keras

    keras.Layer.__call__ = wrap(keras.Layer.__call__)


def put_layer_losses(wrap: Callable[[property], property]) -> None:
    """Let the losses of layers and models be found by another function."""
    import keras

    keras.Layer.losses = wrap(keras.Layer.losses)


def batch_like(shape: Sequence[int], dtype: Any) -> Any:
    """What stands for a batch of any size when a model makes its weights."""
    import keras

    return keras.KerasTensor((None, *shape[1:]) if shape else (), dtype=str(dtype))


def put_variable_assign(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let writes to variables go through another function."""
    import keras

    keras.Variable.assign = wrap(keras.Variable.assign)


def in_stateless_scope() -> bool:
    """Whether variables of Keras have other values than their own here."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    return bool(in_stateless_scope())


@functools.cache
def accept_synchronized() -> None:
    """Let BatchNormalization(synchronized=True) be made, which Keras knows on TensorFlow only.

    It asks for statistics of the whole batch, which all layers have under strategies.
    """
    import keras

    layer = keras.layers.BatchNormalization
    original = layer.__init__

    @functools.wraps(original)
    def accepting(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.asked_for_synchronized = synchronized

    # Keras reads the names of arguments from it, to make layers again from files.
    accepting.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    layer.__init__ = accepting


def all_layers(model: Any) -> list[Any]:
    """The layers of a model, also those within layers."""
    return list(model._flatten_layers())


def is_built(model: Any) -> bool:
    """Whether all layers have their weights."""
    return all(layer.built for layer in model._flatten_layers())


def build(model: Any, batch: Any) -> None:
    """Let the layers of a model make their weights, for batches like this one."""
    import keras

    utils = importlib.import_module("keras.src.trainers.data_adapters.data_adapter_utils")
    x, _, _ = utils.unpack_x_y_sample_weight(batch)
    like = keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, str(leaf.dtype)), x)
    importlib.import_module("keras.src.backend").compute_output_spec(model, like, training=False)


def build_for(model: Any, batch: Any) -> None:
    """Let metrics and the optimizer of a compiled model have their variables."""
    import jax

    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    with jax.ensure_compile_time_eval():  # they outlive the program that may be traced
        model._symbolic_build(data_batch=like)


def is_compiled(model: Any) -> bool:
    """Whether steps of a model are to be compiled, by JAX."""
    return bool(model.jit_compile) and not model.run_eagerly


def loss_tracker(model: Any) -> Any:
    """The metric that a compiled model shows as its loss; None if its metrics do not have it."""
    tracker = getattr(model, "_loss_tracker", None)
    return tracker if any(m is tracker for m in model.metrics) else None


def forget_programs(model: Any) -> None:
    """Let the next call make its programs anew."""
    model.train_function = model.test_function = model.predict_function = None


def first_batch(iterator: Any) -> Any:
    """The batch with which an epoch begins; Keras resets the iterator afterwards."""
    *_, found = next(iter(iterator))
    return found[0] if isinstance(found, list | tuple) else next(found)


def take_value(variable: Any) -> Any:
    """The value of a variable, which is empty from now on."""
    value, variable._value = variable.value, None
    return value


def give_back(model: Any, parts: Sequence[str], state: Sequence[Any]) -> None:
    """Put values into the variables that Keras has emptied for the time of an epoch."""
    model._jax_state = dict(zip(parts, state, strict=True))
    model._jax_state_synced = False
    model.jax_state_sync()


def held_state(model: Any) -> dict[str, Any] | None:
    """What the latest step has returned, until it is in the variables."""
    return None if model._jax_state_synced else getattr(model, "_jax_state", None)


def hold_state(model: Any, state: dict[str, Any]) -> None:
    """Let other values be what the latest step has returned."""
    model._jax_state = state


def hold_taken_state(model: Any, state: dict[str, Any]) -> None:
    """Hold values that were taken out of the variables as if a step had returned them."""
    model._jax_state, model._jax_state_synced = state, False


def forget_state(model: Any) -> None:
    """Let what is in the variables be all: Keras would put old values back after an interrupt."""
    if model._jax_state_synced:
        model._jax_state = None


def first_epoch(model: Any) -> int:
    """The epoch with which `fit` begins, if a callback has read it from a backup."""
    return int(model._initial_epoch or 0)


def set_first_epoch(model: Any, epoch: int) -> None:
    """Let `fit` begin with another epoch."""
    model._initial_epoch = epoch or None


# -- data -----------------------------------------------------------------------------------------


def data_adapter(*args: Any) -> Any:
    """What gives batches of anything that Keras can train on."""
    return importlib.import_module("keras.src.trainers.data_adapters").get_data_adapter(*args)


def adapter_type() -> type[Any]:
    """The base class of what gives batches, which Keras takes as it is."""
    module = importlib.import_module("keras.src.trainers.data_adapters.data_adapter")
    return module.DataAdapter


def without_validation_rows(arrays: Any, split: float) -> tuple[Any, Any]:
    """Arrays without their last rows, and those."""
    module = importlib.import_module("keras.src.trainers.data_adapters.array_slicing")
    return module.train_validation_split(arrays, validation_split=split)


def with_class_weights(batch: Any, class_weight: Any) -> Any:
    """A batch with a weight for each row, by its class."""
    utils = importlib.import_module("keras.src.trainers.data_adapters.data_adapter_utils")
    x, y, weight = utils.unpack_x_y_sample_weight(batch)
    if weight is not None:
        raise InvalidValueError(
            "class_weight and sample weights cannot both be given. "
            f"Received: class_weight={class_weight} and batches with sample weights"
        )
    return x, y, utils.class_weight_to_sample_weights(y, class_weight)


# -- callbacks --------------------------------------------------------------------------------------


def write_events_with(callback: Any, summary: Any) -> None:
    """Let a TensorBoard callback write with another module than TensorFlow's."""
    callback._summary_module = summary
    callback.write_graph = False  # there is no graph of TensorFlow to write


def save_values_with(callback: Any, convert: Callable[[Any], Any]) -> None:
    """Let an OrbaxCheckpoint callback write what a function makes of the value of each variable."""
    import keras

    write = getattr(type(callback), "_save_checkpoint", None)
    if write is None:
        raise UnsupportedError(
            "This build of Keras has moved parts of OrbaxCheckpoint, which several workers need. "
            f"Use ModelCheckpoint. Received: Keras {keras.__version__}"
        )

    def converted(model: Any) -> Callable[..., Any]:
        def get_state_tree(*args: Any, **kwargs: Any) -> Any:
            tree = type(model).get_state_tree(model, *args, **kwargs)
            return keras.tree.map_structure(convert, tree)

        return get_state_tree

    @functools.wraps(write)
    def save(*args: Any, **kwargs: Any) -> None:
        with replaced([callback.model], "get_state_tree", converted):
            write(callback, *args, **kwargs)

    callback._save_checkpoint = save


@contextlib.contextmanager
def replaced(objects: Iterable[Any], name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Let objects of Keras, which watches what is set on them, have an attribute for a while."""
    changed = list(objects)
    for thing in changed:
        object.__setattr__(thing, name, make(thing))
    try:
        yield
    finally:
        for thing in changed:
            object.__delattr__(thing, name)
