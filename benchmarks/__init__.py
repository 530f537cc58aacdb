"""Benchmarks against a peer or a limit of the same run: ``make bench``, or ``python -m benchmarks.NAME`` for one."""
