"""Costs, simulation, search and choice of plans.

A search or a cost model belongs here. The measurements that costs are made of come from ``profiling``.
"""
