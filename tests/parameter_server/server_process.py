"""A parameter server in a process of its own, for tests that kill it."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.net.endpoint import Endpoint
from phalanx.parameter_server.service import PURPOSE, ParameterService
from tests.parameter_server.running import KEY

if __name__ == "__main__":
    endpoint = Endpoint(sys.argv[1], KEY)
    endpoint.serve(PURPOSE, ParameterService(endpoint.loop, Path(sys.argv[2])).admit)
    endpoint.start()
    print(endpoint.address, flush=True)
    sys.stdin.read()  # until the test has ended
