"""Faults of real processes: seeded schedules, histories, and what must be true of these."""
