"""Dense parameters: their values, the reduction of their gradients over ranks, and their optimizer.

Tables and their optimizers are in ``kernels`` and ``sharding``.
"""
