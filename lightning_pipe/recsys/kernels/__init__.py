"""FBGEMM's fused kernels, table optimisers, gradient norms, and the compiled library.

A table optimiser belongs here. Nothing here knows how a table is sharded.
"""
