"""How processes of a job talk to each other: one handshake, one framing and one event loop.

The protocol is pure, bytes in and messages out; sockets and threads are a thin shell around it.

- `phalanx.net.handshake`: how both ends of a connection prove that they know the job's token.
- `phalanx.net.framing`: messages of JSON fields and raw buffers as bytes.
- `phalanx.net.event_loop`: one thread that waits for sockets, timers and calls of other threads.
- `phalanx.net.connection`: a connection in an event loop.
- `phalanx.net.listener`: accepts connections, and admits those that prove themselves.
- `phalanx.net.client`: connects, sends messages, and waits for the answers to requests.
- `phalanx.net.stream`: sends and receives messages in the thread of the caller.
- `phalanx.net.endpoint`: the one place at which a task listens, whatever for, and how it is dialled.
- `phalanx.net.relay`: copies bytes between two sockets.
- `phalanx.net.addresses`: addresses, and the sockets at them.
"""
