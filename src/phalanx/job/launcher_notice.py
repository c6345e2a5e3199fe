"""What a process tells the launcher of its job."""

from __future__ import annotations

import contextlib
import os

from phalanx.errors import PhalanxError
from phalanx.job.hub.connect import connect_to_hub
from phalanx.job.tokens import find_token
from phalanx.net.client import RequestClient

_SECONDS = 10.0  # for the launcher to answer


def tell_whether_workers_train(they_do: bool) -> None:
    """Tell the launcher whether the job is over only when all workers are.

    Workers of a coordinator serve until they are ended; the launcher ends them when the chief is done.
    Workers that train on their own end by themselves. Without a launcher nothing happens.

    Args:
        they_do: whether workers train on their own.
    """
    address = os.environ.get("PHALANX_HUB")
    if not address:
        return
    with contextlib.suppress(PhalanxError, OSError):  # the program can do without
        client = RequestClient(connect_to_hub(address, find_token(True), _SECONDS), "phalanx-notice")
        try:
            client.start().request({"type": "workers", "train": they_do}, timeout=_SECONDS)
        finally:
            client.close()
