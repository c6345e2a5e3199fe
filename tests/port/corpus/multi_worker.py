"""Multi-worker training with a custom loop: TF_CONFIG, the chief, and checkpoints."""

import json
import os
import tempfile

import numpy as np
import tensorflow as tf

if "TF_CONFIG" not in os.environ:
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {}, "task": {}})

strategy = tf.distribute.MultiWorkerMirroredStrategy()
per_worker_batch_size = 4
num_workers = max(len(json.loads(os.environ["TF_CONFIG"])["cluster"].get("worker", [])), 1)
global_batch_size = 8


def dataset_fn(global_batch_size, input_context):
    x = np.arange(48, dtype="float32").reshape(24, 2) / 48
    y = x @ np.array([1.0, 2.0], "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.batch(batch_size)


with strategy.scope():
    multi_worker_dataset = strategy.distribute_datasets_from_function(
        lambda input_context: dataset_fn(global_batch_size, input_context)
    )
    weights = tf.Variable(tf.zeros([2]), name="weights")
    optimizer = tf.keras.optimizers.SGD(0.5)
    train_loss = tf.keras.metrics.Mean(name="train_loss")


def _is_chief(task_type, task_id):
    return task_type is None or task_type == "chief" or (task_type == "worker" and task_id == 0)


task_type = strategy.cluster_resolver.task_type
task_id = strategy.cluster_resolver.task_id


@tf.function
def train_step(iterator):
    def step_fn(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            per_batch_loss = tf.square(tf.reduce_sum(x * weights, axis=1) - y)
            loss = tf.nn.compute_average_loss(per_batch_loss, global_batch_size=global_batch_size)
        grads = tape.gradient(loss, [weights])
        optimizer.apply_gradients(zip(grads, [weights]))
        train_loss.update_state(per_batch_loss)
        return loss

    per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


checkpoint = tf.train.Checkpoint(weights=weights, optimizer=optimizer)
checkpoint_dir = os.environ.get("CKPT_DIR") or tempfile.mkdtemp()
checkpoint_manager = tf.train.CheckpointManager(checkpoint, directory=checkpoint_dir, max_to_keep=1)

for epoch in range(8):
    iterator = iter(multi_worker_dataset)
    total_loss = 0.0
    for step in range(3):
        total_loss += train_step(iterator)
    if epoch % 4 == 3:
        checkpoint_manager.save()
result = float(train_loss.result().numpy())
if _is_chief(task_type, task_id):
    print("loss %.5f" % float(total_loss))
    print("metric %.5f" % result, "saved", checkpoint_manager.latest_checkpoint is not None)
