"""Values of replicas: merge_call, all_reduce, gather, and per-replica values."""

import tensorflow as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
values = strategy.experimental_distribute_values_from_function(
    lambda ctx: tf.constant([float(ctx.replica_id_in_sync_group)])
)


def step(x):
    context = tf.distribute.get_replica_context()
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, x)
    return total, tf.cast(context.replica_id_in_sync_group, tf.float32)


total, ids = strategy.run(step, args=(values,))
print("total", strategy.experimental_local_results(total)[0].numpy().tolist())
print("gathered", strategy.gather(values, axis=0).numpy().tolist())
print("mean id", float(strategy.reduce(tf.distribute.ReduceOp.MEAN, ids, axis=None).numpy()))
