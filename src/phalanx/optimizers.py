"""`px.optimizers`: optimizers with Keras's arguments and formulas; each is a `px.train.Optimizer`."""

from phalanx.train import schedules
from phalanx.train.keras_optimizers import SGD, Adagrad, Adam, AdamW, RMSprop

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "schedules"]
