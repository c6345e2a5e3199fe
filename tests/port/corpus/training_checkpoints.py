"""Training checkpoints: a manager, a step counter, and an iterator that goes on where it was."""

import tempfile

import tensorflow as tf


class Net(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.zeros([2]), name="w")

    def __call__(self, x):
        return tf.reduce_sum(x * self.w, axis=1)


def toy_dataset():
    inputs = tf.range(10.0)[:, None]
    labels = inputs * 5.0 + tf.range(2.0)[None, :]
    return tf.data.Dataset.from_tensor_slices(dict(x=labels, y=inputs[:, 0])).repeat().batch(2)


def train_step(net, example, optimizer):
    with tf.GradientTape() as tape:
        output = net(example["x"])
        loss = tf.reduce_mean(tf.abs(output - example["y"]))
    variables = [net.w]
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables))
    return loss


folder = tempfile.mkdtemp()


def train_and_checkpoint(steps):
    net, opt = Net(), tf.keras.optimizers.Adam(0.05)
    iterator = iter(toy_dataset())
    ckpt = tf.train.Checkpoint(step=tf.Variable(1), optimizer=opt, net=net, iterator=iterator)
    manager = tf.train.CheckpointManager(ckpt, folder, max_to_keep=3)
    opt.build([net.w])
    ckpt.restore(manager.latest_checkpoint)
    if manager.latest_checkpoint:
        print("restored at", int(ckpt.step.numpy()))
    else:
        print("from scratch")
    seen = []
    for _ in range(steps):
        example = next(iterator)
        seen.append(float(example["y"][0]))
        train_step(net, example, opt)
        ckpt.step.assign_add(1)
        if int(ckpt.step) % 10 == 0:
            manager.save()
    return seen


train_and_checkpoint(29)
seen = train_and_checkpoint(3)
print("goes on with", seen)
