"""Contrastive learning over replicas: gathered representations, a warm-up schedule, summaries."""

import math
import os
import tempfile

import numpy as np
import tensorflow as tf

tf.random.set_seed(4)
LARGE_NUM = 1e9
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
model_dir = tempfile.mkdtemp()
x = np.random.RandomState(3).normal(size=(32, 5)).astype("float32")


class WarmUpAndCosineDecay(tf.keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, base_learning_rate, steps):
        super().__init__()
        self.base_learning_rate = base_learning_rate
        self.steps = steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        warm = step / 2.0 * self.base_learning_rate
        cosine = self.base_learning_rate * 0.5 * (1 + tf.cos(math.pi * step / self.steps))
        return tf.where(step < 2.0, warm, cosine)

    def get_config(self):
        return {"base_learning_rate": self.base_learning_rate, "steps": self.steps}


with strategy.scope():
    projection = tf.Variable(tf.random.normal([5, 3]), name="projection")
    optimizer = tf.keras.optimizers.SGD(WarmUpAndCosineDecay(0.5, 20), momentum=0.9)
    contrast_loss = tf.keras.metrics.Mean("train/contrast_loss")
    contrast_accuracy = tf.keras.metrics.Accuracy("train/contrast_acc")
    all_metrics = [contrast_loss, contrast_accuracy]


def add_contrastive_loss(hidden1, hidden2):
    context = tf.distribute.get_replica_context()
    large1 = context.all_gather(hidden1, axis=0)
    large2 = context.all_gather(hidden2, axis=0)
    batch = tf.shape(hidden1)[0]
    total = tf.shape(large1)[0]
    labels_idx = tf.range(batch) + context.replica_id_in_sync_group * batch
    labels = tf.one_hot(labels_idx, total)
    logits_ab = tf.matmul(hidden1, tf.transpose(large2)) * 5.0
    logits_ab = tf.reshape(logits_ab, [batch, total])
    losses = tf.nn.softmax_cross_entropy_with_logits(labels, logits_ab)
    return losses, logits_ab, labels


def single_step(features):
    with tf.GradientTape() as tape:
        view1 = features + 0.1 * tf.random.normal([8, 5])
        view2 = features + 0.1 * tf.random.normal([8, 5])
        raw1 = tf.matmul(view1, projection)
        raw2 = tf.matmul(view2, projection)
        hidden1 = raw1 / tf.norm(raw1, axis=1, keepdims=True)
        hidden2 = raw2 / tf.norm(raw2, axis=1, keepdims=True)
        losses, logits, labels = add_contrastive_loss(hidden1, hidden2)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=16)
    contrast_loss.update_state(losses)
    contrast_accuracy.update_state(tf.argmax(labels, axis=1), tf.argmax(logits, axis=1))
    grads = tape.gradient(loss, [projection])
    optimizer.apply_gradients(zip(grads, [projection]))


@tf.function(jit_compile=False)
def train_multiple_steps(iterator):
    for _ in tf.range(2):
        strategy.run(single_step, (next(iterator),))


ds = tf.data.Dataset.from_tensor_slices(x).repeat().batch(16, drop_remainder=True)
iterator = iter(strategy.experimental_distribute_dataset(ds))
summary_writer = tf.summary.create_file_writer(model_dir)
first = None
with summary_writer.as_default():
    for _ in range(10):
        train_multiple_steps(iterator)
        cur_step = optimizer.iterations.numpy()
        for metric in all_metrics:
            tf.summary.scalar(metric.name, metric.result().numpy(), step=cur_step)
        first = first or float(contrast_loss.result().numpy())
        last = float(contrast_loss.result().numpy())
        for metric in all_metrics:
            metric.reset_states()
    summary_writer.flush()
tf.print("steps", int(cur_step), "files", len(os.listdir(model_dir)))
print("loss falls", last < first)
