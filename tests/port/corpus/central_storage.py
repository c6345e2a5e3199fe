"""Central storage, a variable that is aggregated, and one that is read over replicas."""

import tensorflow as tf

strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
with strategy.scope():
    total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    seen = tf.Variable(
        0.0,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


@tf.function
def run():
    def step():
        i = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        total.assign_add(i + 1.0)
        seen.assign_add(i * 0.0 + 1.0)

    strategy.run(step)


run()
run()
print("total", total.numpy(), "seen", seen.numpy())
