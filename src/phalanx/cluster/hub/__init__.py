"""The second plane of a job of several workers: who is there, what they do, and what went wrong.

JAX moves the data. The *hub* is a small server with one connection to each worker that carries
everything else. It runs in the launcher, or in a process of its own next to the first worker.

- `phalanx.cluster.hub.facts`: tasks, failures and how they read; plain data.
- `phalanx.cluster.hub.board`: what the hub knows, as a pure state machine.
- `phalanx.cluster.hub.frames`: messages as bytes, and the proof that a peer belongs to the job.
- `phalanx.cluster.hub.server`: `Hub`, the sockets around the board.
- `phalanx.cluster.hub.client`: `Member`, a worker's end.
- `phalanx.cluster.hub.table`: the table of workers that people read.
- `phalanx.cluster.hub.agreement`, `phalanx.cluster.hub.progress`: which programs run, and how far.
- `phalanx.cluster.hub.tunnel`: the way of JAX's own connections through the hub.
- `phalanx.cluster.hub.process`: a hub in a process of its own.
- `phalanx.cluster.hub.service`: JAX's own service, which runs in the hub's process.
"""
