"""distribute_datasets_from_function, with an input context and options."""

import tensorflow as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def dataset_fn(context):
    batch = context.get_per_replica_batch_size(8)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    d = tf.data.Dataset.range(16).map(lambda x: x * 2).batch(batch)
    d = d.shard(context.num_input_pipelines, context.input_pipeline_id)
    return d.with_options(options)


dist = strategy.distribute_datasets_from_function(dataset_fn)
total = 0
for x in dist:
    per_replica = strategy.run(lambda x: tf.reduce_sum(x), args=(x,))
    total += int(strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None).numpy())
print("total", total)
