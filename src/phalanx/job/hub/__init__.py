"""The second plane of a job of several workers: who is there, what they do, and what went wrong.

JAX moves the data. The *hub* is a small server with one connection to each worker that carries
everything else. It runs in the launcher, or in a process of its own next to the first worker.

- `phalanx.job.hub.descriptions`: tasks, failures and how they read; plain data.
- `phalanx.job.hub.job_state`: what the hub knows, as a pure state machine.
- `phalanx.job.hub.server`: `Hub`, the connections around the state.
- `phalanx.job.hub.client`: `Member`, a worker's end.
- `phalanx.job.hub.connect`: what connections to the hub are for.
- `phalanx.job.hub.worker_table`: the table of workers that people read.
- `phalanx.job.hub.program_order`, `phalanx.job.hub.progress`: which programs run, and how far.
- `phalanx.job.hub.tunnel`: the way of JAX's own connections through the hub.
- `phalanx.job.hub.hub_process`: a hub in a process of its own.
- `phalanx.job.hub.coordination_service`: JAX's own service, which runs in the hub's process.
"""
