"""Keras runs on JAX in all tests."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
