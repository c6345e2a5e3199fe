"""Scalars for TensorBoard from a compiled step."""

import os
import tempfile

import tensorflow as tf

logs = tempfile.mkdtemp()
writer = tf.summary.create_file_writer(logs)
step = tf.Variable(0, dtype=tf.int32)


@tf.function
def count(x):
    tf.summary.scalar("x", x, step=step)
    step.assign_add(1)
    return x * 2.0


with writer.as_default():
    for i in range(3):
        count(tf.constant(float(i)))
writer.flush()
print("files", len(os.listdir(logs)))
