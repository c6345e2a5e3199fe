"""`px.nn`: helpers for losses under a strategy."""

from phalanx.core.losses import compute_average_loss, scale_regularization_loss

__all__ = ["compute_average_loss", "scale_regularization_loss"]
