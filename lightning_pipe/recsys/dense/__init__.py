"""Dense parameters: their values, the reduction of their gradients over ranks, and their optimiser.

Tables and their optimisers are in ``kernels`` and ``sharding``.
"""
