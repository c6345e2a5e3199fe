"""Custom training with tf.distribute.Strategy: a Keras model in a loop of its own."""

# Import TensorFlow
import tensorflow as tf

# Helper libraries
import numpy as np
import os
import tempfile

print("TensorFlow", tf.__version__ > "")
tf.random.set_seed(0)
tf.keras.utils.set_random_seed(0)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
GLOBAL_BATCH_SIZE = 16
EPOCHS = 4

rng = np.random.RandomState(1)
train_images = rng.normal(size=(64, 6)).astype("float32")
train_labels = (train_images.sum(axis=1) > 0).astype("int32")
train_dataset = (
    tf.data.Dataset.from_tensor_slices((train_images, train_labels))
    .shuffle(64)
    .batch(GLOBAL_BATCH_SIZE)
)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dataset = tf.data.Dataset.from_tensor_slices((train_images, train_labels)).batch(GLOBAL_BATCH_SIZE)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model():
    regularizer = tf.keras.regularizers.L2(1e-5)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(8, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.Dense(2),
        ]
    )
    return model


checkpoint_prefix = os.path.join(tempfile.mkdtemp(), "ckpt")

with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model = create_model()
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.05)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    t_loss = loss_object(labels, predictions)
    test_loss.update_state(t_loss)
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


losses = []
for epoch in range(EPOCHS):
    total_loss = 0.0
    num_batches = 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    losses.append(float(total_loss / num_batches))
    for x in test_dist_dataset:
        distributed_test_step(x)
    if epoch % 2 == 0:
        path = checkpoint.save(checkpoint_prefix)
    accuracy = test_accuracy.result() * 100
    test_loss.reset_states()
    train_accuracy.reset_states()
    test_accuracy.reset_states()

print("loss falls", losses[-1] < losses[0], "accuracy above 80", float(accuracy) > 80)
eval_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
new_model = create_model()
new_optimizer = tf.keras.optimizers.Adam()


@tf.function
def eval_step(images, labels):
    predictions = new_model(images, training=False)
    eval_accuracy(labels, predictions)


for x in test_dist_dataset:
    distributed_test_step(x)
checkpoint.save(checkpoint_prefix)
checkpoint = tf.train.Checkpoint(optimizer=new_optimizer, model=new_model)
checkpoint.restore(tf.train.latest_checkpoint(os.path.dirname(checkpoint_prefix)))
for images, labels in test_dataset:
    eval_step(images, labels)
print("restored", float(eval_accuracy.result()) == float(test_accuracy.result()))
