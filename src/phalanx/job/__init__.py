"""A running job: its processes, the hub that they share, and what happens when one of them fails."""
