"""Faults of real processes.

``schedules`` says what goes wrong and when, ``proxies`` does it to connections, ``history`` holds what
happened, and ``checkers`` what must be true of it.
"""
