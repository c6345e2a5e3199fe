"""`px.data`: datasets as plans."""

from phalanx.data.dataset import Dataset
from phalanx.data.iterator import Iterator

__all__ = ["Dataset", "Iterator"]
