"""FBGEMM's fused kernels, table optimisers, gradient norms, and the compiled library.

A table optimiser belongs here. The optimiser of dense parameters is in ``dense``.
"""
