"""`px.io`: records, and the `px.train.Example` messages in them."""

from phalanx.data.files.parse_example import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    VarLenFeature,
    decode_raw,
    parse_example,
    parse_single_example,
)
from phalanx.data.files.record_writer import TFRecordOptions, TFRecordWriter

__all__ = [
    "FixedLenFeature",
    "FixedLenSequenceFeature",
    "TFRecordOptions",
    "TFRecordWriter",
    "VarLenFeature",
    "decode_raw",
    "parse_example",
    "parse_single_example",
]
