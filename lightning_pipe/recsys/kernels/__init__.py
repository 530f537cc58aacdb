"""FBGEMM's fused kernels, table optimizers, gradient norms, and the compiled library.

Table optimizers belong here. The optimizer of dense parameters is in ``dense``.
"""
