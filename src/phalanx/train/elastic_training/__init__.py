"""Training that goes on while workers come and go."""
