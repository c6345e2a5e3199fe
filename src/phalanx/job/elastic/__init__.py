"""Jobs whose workers come and go: who is in, since which step, and where the door is."""
