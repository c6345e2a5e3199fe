"""How `Strategy.run` runs."""
