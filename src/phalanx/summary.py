"""`px.summary`: numbers, images and texts for TensorBoard, written without TensorFlow."""

from phalanx.train.summaries import (
    SummaryWriter,
    create_file_writer,
    create_noop_writer,
    flush,
    get_step,
    histogram,
    image,
    record_if,
    scalar,
    set_step,
    should_record_summaries,
    text,
)

__all__ = [
    "SummaryWriter",
    "create_file_writer",
    "create_noop_writer",
    "flush",
    "get_step",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "set_step",
    "should_record_summaries",
    "text",
]
