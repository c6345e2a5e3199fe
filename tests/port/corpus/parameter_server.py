"""Parameter server training: servers in this process, a coordinator, and per-worker datasets."""

import os

import tensorflow as tf

PORTS = os.environ["PORTS"].split(",")


def pick_unused_port():
    return PORTS.pop()


def create_in_process_cluster(num_workers, num_ps):
    worker_ports = [pick_unused_port() for _ in range(num_workers)]
    ps_ports = [pick_unused_port() for _ in range(num_ps)]
    cluster_dict = {}
    cluster_dict["worker"] = ["localhost:%s" % port for port in worker_ports]
    if num_ps > 0:
        cluster_dict["ps"] = ["localhost:%s" % port for port in ps_ports]
    cluster_spec = tf.train.ClusterSpec(cluster_dict)
    servers = []
    for i in range(num_workers):
        servers.append(tf.distribute.Server(cluster_spec, job_name="worker", task_index=i))
    for i in range(num_ps):
        servers.append(tf.distribute.Server(cluster_spec, job_name="ps", task_index=i))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")
    return resolver, servers


cluster_resolver, servers = create_in_process_cluster(2, 2)
variable_partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=8, max_shards=2
)
strategy = tf.distribute.ParameterServerStrategy(
    cluster_resolver, variable_partitioner=variable_partitioner
)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

with strategy.scope():
    w = tf.Variable(tf.zeros([4, 1]), name="w")
    optimizer = tf.keras.optimizers.SGD(learning_rate=0.05)


def dataset_fn():
    def make(i):
        i = tf.cast(i, tf.float32)
        x = tf.stack([i % 2, i % 3, i % 5, 1.0 + 0.0 * i])
        return x, tf.reduce_sum(x * tf.constant([1.0, 0.0, -1.0, 2.0]))

    return tf.data.Dataset.range(60).map(make).shuffle(60).repeat().batch(10)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(lambda _: dataset_fn())


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)


@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = tf.matmul(batch_data, tf.convert_to_tensor(w))
            loss = tf.reduce_mean(tf.square(pred[:, 0] - labels))
            gradients = tape.gradient(loss, [w])
        optimizer.apply_gradients(zip(gradients, [w]))
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


num_epochs = 3
steps_per_epoch = 100
for i in range(num_epochs):
    for _ in range(steps_per_epoch):
        loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
    coordinator.join()
print("steps", int(optimizer.iterations.numpy()))
print("loss below 1", float(loss.fetch()) < 1.0, "shards", len(w.variables))
