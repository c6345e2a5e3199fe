"""How a plan runs: iterators, threads, and reading ahead."""
