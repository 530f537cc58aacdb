"""Figures against a peer or a limit of the same run: ``make bench`` for all, ``python -m benchmarks.NAME`` for one."""
