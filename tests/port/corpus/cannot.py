"""What cannot be rewritten: a tape that watches nothing by itself, and a device scope."""

import tensorflow as tf

x = tf.Variable(3.0)


def first(watch):
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        y = watch * watch
    return tape.gradient(y, watch)


def second(y):
    with tf.device("CPU:0"):
        return y + 1.0


print("x", float(tf.reduce_sum(x).numpy()))
