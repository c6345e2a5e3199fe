"""A step of one's own in fit, as in the guide: gradients, metrics, sample weights, evaluation."""

import tensorflow as tf
import numpy as np
from tensorflow import keras

keras.utils.set_random_seed(0)


class CustomModel(keras.Model):
    def train_step(self, data):
        # Unpack the data. Its structure depends on your model and
        # on what you pass to `fit()`.
        if len(data) == 3:
            x, y, sample_weight = data
        else:
            sample_weight = None
            x, y = data

        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)  # Forward pass
            # Compute the loss value.
            # The loss function is configured in `compile()`.
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)

        # Compute gradients
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)

        # Update weights
        self.optimizer.apply_gradients(zip(gradients, trainable_vars))

        # Update metrics (includes the metric that tracks the loss)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)

        # Return a dict mapping metric names to current value
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        # Unpack the data
        x, y = data
        # Compute predictions
        y_pred = self(x, training=False)
        # Updates the metrics tracking the loss
        loss = self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
rng = np.random.RandomState(0)
x = rng.random_sample((50, 32)).astype("float32")
y = rng.random_sample((50, 1)).astype("float32")
sw = rng.random_sample((50, 1)).astype("float32")
with strategy.scope():
    inputs = keras.Input(shape=(32,))
    outputs = keras.layers.Dense(1)(inputs)
    model = CustomModel(inputs, outputs)
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
model.set_weights([np.ones((32, 1)) / 32, np.zeros(1)])
h = model.fit(x, y, epochs=3, verbose=0, shuffle=False, batch_size=12)
print({k: [round(float(v), 4) for v in vs] for k, vs in h.history.items()})
h = model.fit(x, y, sample_weight=sw, epochs=1, verbose=0, shuffle=False, batch_size=12)
print({k: [round(float(v), 4) for v in vs] for k, vs in h.history.items()})
print([round(float(v), 4) for v in model.evaluate(x, y, verbose=0)])
