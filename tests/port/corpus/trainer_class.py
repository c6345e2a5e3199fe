"""A trainer as a class, as tensorflow/models and many programs have it."""

import tensorflow as tf
import numpy as np
from tensorflow.keras import layers, Model


class MyModel(Model):
    def __init__(self):
        super(MyModel, self).__init__()
        self.conv1 = layers.Conv2D(4, 3, activation="relu")
        self.flatten = layers.Flatten()
        self.d1 = layers.Dense(8, activation="relu")
        self.drop = layers.Dropout(0.2)
        self.d2 = layers.Dense(3)

    def call(self, x, training=False):
        x = self.conv1(x)
        x = self.flatten(x)
        x = self.d1(x)
        return self.d2(self.drop(x, training=training))


class Train(object):
    def __init__(self, epochs, enable_function, model, batch_size, strategy):
        self.epochs = epochs
        self.batch_size = batch_size
        self.enable_function = enable_function
        self.strategy = strategy
        self.loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=tf.keras.losses.Reduction.NONE
        )
        self.optimizer = tf.keras.optimizers.SGD(learning_rate=0.05, momentum=0.9, nesterov=True)
        self.train_acc_metric = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        self.train_loss_metric = tf.keras.metrics.Sum(name="train_loss")
        self.model = model

    def compute_loss(self, label, predictions):
        loss = tf.reduce_sum(self.loss_object(label, predictions)) * (1.0 / self.batch_size)
        loss += sum(self.model.losses) * 1.0 / self.strategy.num_replicas_in_sync
        return loss

    def train_step(self, inputs):
        image, label = inputs
        with tf.GradientTape() as tape:
            predictions = self.model(image, training=True)
            loss = self.compute_loss(label, predictions)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        self.train_acc_metric(label, predictions)
        self.train_loss_metric(loss)
        return loss

    def custom_loop(self, train_dist_dataset, strategy):
        def distributed_train_epoch(ds):
            total_loss = 0.0
            num_train_batches = 0.0
            for one_batch in ds:
                per_replica_loss = strategy.run(self.train_step, args=(one_batch,))
                total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_loss, axis=None)
                num_train_batches += 1
            return total_loss, num_train_batches

        if self.enable_function:
            distributed_train_epoch = tf.function(distributed_train_epoch)
        losses = []
        for epoch in range(self.epochs):
            train_total_loss, num_train_batches = distributed_train_epoch(train_dist_dataset)
            losses.append(float(train_total_loss / num_train_batches))
            template = "Epoch: {}, Train Loss: {}, Train Accuracy: {}"
            text = template.format(epoch, losses[-1], self.train_acc_metric.result().numpy())
            if epoch != self.epochs - 1:
                self.train_loss_metric.reset_states()
                self.train_acc_metric.reset_states()
        return losses, text


def main(epochs=4, enable_function=True, batch_size=16):
    strategy = tf.distribute.MirroredStrategy()
    rng = np.random.RandomState(0)
    x = rng.normal(size=(64, 6, 6, 1)).astype("float32")
    y = (x.mean(axis=(1, 2, 3)) > 0).astype("int64")
    train_dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).batch(batch_size)
    with strategy.scope():
        model = MyModel()
        trainer = Train(epochs, enable_function, model, batch_size, strategy)
        train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
        losses, text = trainer.custom_loop(train_dist_dataset, strategy)
    print(text[:8], "loss falls", losses[-1] < losses[0])


if __name__ == "__main__":
    main()
