"""How a dataset is divided over workers and replicas, and how its rows reach the devices.

From the bottom up:

* ``splitting``                    the rules: which rows and files go where, as arithmetic on sizes
* ``rebatching``, ``sharding``     nodes that carry them out, and which of them a plan gets
* ``steps``                        what the replicas of one worker get, step by step
* ``device_transfer``, ``step_producer``   steps on devices, agreed on by all workers
* ``input_topology``, ``per_replica_spec``, ``optional``, ``description``   what the last two need
* ``distributed_dataset``, ``factory``   what users see, and how strategies make it
* ``audit``                        counts whether every example is seen once
"""
