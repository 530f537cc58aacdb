"""Dense parameters: their values, the reduction of their gradients over ranks, and the user's optimiser of them.

Tables and their optimisers are in ``kernels`` and ``sharding``.
"""
