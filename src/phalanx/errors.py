"""`px.errors`: everything that Phalanx raises on purpose."""

from phalanx.core.errors import *  # noqa: F403
