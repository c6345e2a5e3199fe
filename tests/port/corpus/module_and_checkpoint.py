"""A tf.Module, saved and restored."""

import tempfile

import tensorflow as tf


class Dense(tf.Module):
    def __init__(self, inputs, outputs, name=None):
        super().__init__(name=name)
        with self.name_scope:
            self.w = tf.Variable(tf.ones([inputs, outputs]), name="w")
            self.b = tf.Variable(tf.zeros([outputs]), name="b")

    def __call__(self, x):
        return tf.nn.relu(tf.matmul(x, self.w) + self.b)


strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
with strategy.scope():
    model = Dense(3, 2)
checkpoint = tf.train.Checkpoint(model=model)
path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
model.w.assign(tf.zeros_like(model.w))
checkpoint.restore(path)
out = strategy.run(model, args=(tf.constant([[1.0, 2.0, 3.0]]),))
print("out", out.numpy().tolist())
print("variables", [v.name for v in model.trainable_variables])
