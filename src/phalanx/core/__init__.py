"""What things mean: contexts, values, variables, strategies. No threads, sockets or files."""
