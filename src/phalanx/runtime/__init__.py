"""The machine and the internals of JAX: devices, memory, deadlines, interrupts, call sites."""
