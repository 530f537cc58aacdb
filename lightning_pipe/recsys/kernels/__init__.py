"""FBGEMM's fused kernels, table optimisers, gradient norms, and the compiled library.

Table optimisers belong here. The optimiser of dense parameters is in ``dense``.
"""
