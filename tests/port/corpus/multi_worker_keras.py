"""Multi-worker training with Keras, as in the tutorial, on one worker too."""

import json
import os
import sys
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers, optimizers, losses, metrics

flags_dir = tempfile.mkdtemp()
if "." not in sys.path:
    sys.path.insert(0, ".")


def mnist_dataset(batch_size):
    rng = np.random.RandomState(1)
    x_train = rng.randint(0, 255, size=(120, 8, 8)).astype("uint8")
    y_train = rng.randint(0, 4, size=120)
    x_train = x_train / np.float32(255)
    y_train = y_train.astype(np.int64)
    train_dataset = (
        tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(60000).repeat().batch(batch_size)
    )
    return train_dataset


def build_and_compile_cnn_model():
    model = keras.Sequential(
        [
            layers.InputLayer(input_shape=(8, 8)),
            layers.Reshape(target_shape=(8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(4),
        ]
    )
    model.compile(
        loss=losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=optimizers.SGD(learning_rate=0.001),
        metrics=[metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model


tf_config = json.loads(
    os.environ.get(
        "TF_CONFIG",
        '{"cluster": {"worker": ["localhost:12345"]}, "task": {"type": "worker", "index": 0}}',
    )
)
num_workers = len(tf_config["cluster"]["worker"])
per_worker_batch_size = 16
global_batch_size = per_worker_batch_size * num_workers

strategy = tf.distribute.MultiWorkerMirroredStrategy()
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
multi_worker_dataset = mnist_dataset(global_batch_size).with_options(options)

with strategy.scope():
    # Model building/compiling need to be within `strategy.scope()`.
    multi_worker_model = build_and_compile_cnn_model()

callbacks = [tf.keras.callbacks.BackupAndRestore(backup_dir=os.path.join(flags_dir, "backup"))]
multi_worker_model.fit(
    multi_worker_dataset, epochs=3, steps_per_epoch=5, callbacks=callbacks, verbose=0
)
for layer in multi_worker_model.layers:
    print(type(layer).__name__, [tuple(w.shape) for w in layer.weights])

model_path = os.path.join(flags_dir, "keras-model")


def _is_chief(task_type, task_id, cluster_spec):
    return (
        task_type is None
        or task_type == "chief"
        or (task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict())
    )


def _get_temp_dir(dirpath, task_id):
    base_dirpath = "workertemp_" + str(task_id)
    temp_dir = os.path.join(dirpath, base_dirpath)
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id, cluster_spec):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id, cluster_spec):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


task_type, task_id, cluster_spec = (
    strategy.cluster_resolver.task_type,
    strategy.cluster_resolver.task_id,
    strategy.cluster_resolver.cluster_spec(),
)
write_model_path = write_filepath(model_path + ".keras", task_type, task_id, cluster_spec)
multi_worker_model.save(write_model_path)
if not _is_chief(task_type, task_id, cluster_spec):
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))

loaded_model = tf.keras.models.load_model(model_path + ".keras")
loaded_model.fit(multi_worker_dataset, epochs=2, steps_per_epoch=5, verbose=0)

checkpoint_dir = os.path.join(flags_dir, "ckpt")
checkpoint = tf.train.Checkpoint(model=multi_worker_model)
write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id, cluster_spec)
checkpoint_manager = tf.train.CheckpointManager(
    checkpoint, directory=write_checkpoint_dir, max_to_keep=1
)
checkpoint_manager.save()
latest_checkpoint = tf.train.latest_checkpoint(checkpoint_dir)
checkpoint.restore(latest_checkpoint)
print("restored", latest_checkpoint is not None, "chief", _is_chief(task_type, task_id, cluster_spec))
multi_worker_model.fit(multi_worker_dataset, epochs=1, steps_per_epoch=2, verbose=0)
