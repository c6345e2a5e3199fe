"""What the `TensorBoard` callback of Keras asks of `tf.summary`, from `px.summary`."""

from __future__ import annotations

from typing import Any

from phalanx.train import summaries


class TensorBoardSummary:
    """The functions of `tf.summary` that the callback calls."""

    create_file_writer = staticmethod(summaries.create_file_writer)
    record_if = staticmethod(summaries.record_if)
    scalar = staticmethod(summaries.scalar)
    histogram = staticmethod(summaries.histogram)
    image = staticmethod(summaries.image)

    @staticmethod
    def trace_on(**kwargs: Any) -> None:
        """Do nothing: there is no graph of TensorFlow."""

    @staticmethod
    def trace_export(**kwargs: Any) -> None:
        """Do nothing: there is no graph of TensorFlow."""
