"""The machine and the internals of JAX.

* JAX: ``private_names``, ``compat`` (every private call), ``devices``, ``placement``,
  ``program_parts``, ``host_memory``
* waiting: ``deadlines``, ``interrupts``, ``turns``, ``awaiting``, ``activity``
* messages to people: ``formatting``, ``numbers``, ``printing``, ``spelling``, ``call_site``
* other processes: ``pickling``, ``shipping``, ``protobuf_wire``, ``processes``
"""
