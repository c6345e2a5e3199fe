"""`px.data`: datasets as plans that run on whole batches at once.

From the bottom up: ``plan`` (what a dataset is), ``run`` (how it runs), ``ops`` (a node per
transformation), ``transformations`` and ``dataset`` (`Dataset` itself), ``files`` (what is read from
files) and ``distribute`` (how it reaches replicas).
"""

from phalanx.data import experimental
from phalanx.data.dataset import Dataset
from phalanx.data.distribute.audit import AuditReport, audit
from phalanx.data.files.datasets import (
    CsvDataset,
    FixedLengthRecordDataset,
    ParquetDataset,
    TextLineDataset,
    TFRecordDataset,
)
from phalanx.data.files.record_writer import TFRecordOptions, TFRecordWriter
from phalanx.data.plan.argument_checks import AUTOTUNE
from phalanx.data.plan.dataset_options import Options
from phalanx.data.plan.elements import DatasetSpec, Ragged, RaggedSpec
from phalanx.data.plan.nodes import INFINITE as INFINITE_CARDINALITY, UNKNOWN as UNKNOWN_CARDINALITY
from phalanx.data.run.iterator import Iterator

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "AuditReport",
    "CsvDataset",
    "Dataset",
    "DatasetSpec",
    "FixedLengthRecordDataset",
    "Iterator",
    "Options",
    "ParquetDataset",
    "Ragged",
    "RaggedSpec",
    "TFRecordDataset",
    "TFRecordOptions",
    "TFRecordWriter",
    "TextLineDataset",
    "audit",
    "experimental",
]


def __dir__() -> list[str]:
    return __all__
