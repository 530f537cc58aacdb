"""Dense parameters: their values, and the reduction of their gradients over ranks.

Tables and their optimisers are in ``kernels`` and ``sharding``.
"""
