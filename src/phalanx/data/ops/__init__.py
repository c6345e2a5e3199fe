"""The nodes of a plan, one module per kind of transformation."""
