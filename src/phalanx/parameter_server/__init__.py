"""Variables that live in other processes: parameter servers, and how other tasks reach them.

What a server does is pure, from requests to answers; sockets and files are a thin shell around it.

- `phalanx.parameter_server.requests`: what tasks ask of parameter servers.
- `phalanx.parameter_server.store`: what a server holds, and the rules for changing it once.
- `phalanx.parameter_server.updates`: what each update means, in NumPy.
- `phalanx.parameter_server.server_optimizer`: optax on a server, dense and sparse.
- `phalanx.parameter_server.placing`, `recovery`: the servers of a commit, and what became of one.
- `phalanx.parameter_server.settler`: asks servers what a lost worker has done.
- `phalanx.parameter_server.own_tokens`: names of updates that belong to no closure.
- `phalanx.parameter_server.wire`, `commands`: requests as buffers, and performed on a store.
- `phalanx.parameter_server.journal`, `snapshots`, `durability`: what outlives a server.
- `phalanx.parameter_server.service`: a server at an endpoint.
- `phalanx.parameter_server.client`, `server_link`, `lane`, `buffers`: how a task reaches all servers.
- `phalanx.parameter_server.local`: the same servers without connections.
- `phalanx.parameter_server.closure`: what a scheduled function does to variables.
- `phalanx.parameter_server.home`: the servers of a strategy, outside of scheduled functions.
- `phalanx.parameter_server.watch`, `joining`: whether servers live, and which run they serve.
- `phalanx.parameter_server.remote_variable`, `sharded_variable`, `rows`: variables as references.
- `phalanx.parameter_server.session`: what the tasks of a run share.
- `phalanx.parameter_server.placement`, `options`: which server holds what, and how a job behaves.
"""
