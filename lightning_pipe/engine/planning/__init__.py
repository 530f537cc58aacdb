"""Costs, simulation, search and choice of plans.

A search or a cost model belongs here; what measures costs is in ``profiling``.
"""
