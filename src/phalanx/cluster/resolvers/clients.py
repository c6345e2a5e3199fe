"""What only some resolvers talk to: optional packages, and the metadata server of Google Cloud."""

from __future__ import annotations

import importlib
import os
import urllib.request
from typing import Any

from phalanx.errors import ClusterEnvironmentError, MissingPackageError
from phalanx.runtime.formatting import shown

_METADATA_SECONDS = 10


def optional_module(name: str, user: str, extra: str, instead: str) -> Any:
    """Imports a module of an optional package.

    Without the package, the error says who needs it, which extra of Phalanx brings it, and what
    argument makes it unnecessary.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"{user} needs the Python package `{name.partition('.')[0]}`, which is not installed. "
            f"Run `pip install 'phalanx[{extra}]'`, or give `{instead}`. Received: {error}",
            name=name,
        ) from error


def google_service(
    name: str, version: str, credentials: Any, *, user: str, discovery_url: str | None = None
) -> Any:
    """Makes a client for one of Google's services. Credentials are the default ones if not given."""
    discovery = optional_module("googleapiclient.discovery", user, extra="gcp", instead="service")
    address = {"discoveryServiceUrl": discovery_url} if discovery_url else {}
    return discovery.build(
        name,
        version,
        credentials=None if credentials == "default" else credentials,
        cache_discovery=False,
        **address,
    )


def google_metadata(path: str) -> str:
    """Asks the metadata server of this Google Cloud machine, for example for ``instance/zone``."""
    server = (
        os.environ.get("GCE_METADATA_HOST")
        or os.environ.get("GCE_METADATA_IP")
        or "metadata.google.internal"
    )
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as response:
            return str(response.read().decode())
    except OSError as error:  # no such server, no answer in time, no such entry
        raise ClusterEnvironmentError(
            f"The metadata server {server} does not answer for {shown(path)}. It exists on machines of "
            f"Google Cloud only; elsewhere, name the project, the zone and the TPU. Received: {error}"
        ) from error
