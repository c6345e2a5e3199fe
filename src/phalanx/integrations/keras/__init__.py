"""Keras 3 on JAX under strategies: models that are made in a scope train on all replicas.

The compiled step is Keras's own step for the whole batch. Only where arrays live is ours: the state is
on every replica's device, rows are divided, and XLA divides the computation. So losses, metrics,
clipping, masks and custom train steps mean what they mean on one device.

The public names are in `px.keras`. ``touch_points`` is the one file that knows private parts of Keras.
"""
