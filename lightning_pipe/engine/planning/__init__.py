"""Cost models, simulation, search and choice of plans.

New searches and cost models belong here. The measurements behind the costs come from ``profiling``.
"""
