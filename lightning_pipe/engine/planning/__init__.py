"""Cost models, simulation, search and choice of plans.

New searches and cost models belong here. Costs are made from the measurements of ``profiling``.
"""
