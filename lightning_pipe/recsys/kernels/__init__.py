"""FBGEMM's fused kernels, the optimisers of tables, gradient norms, and the compiled library.

Nothing here knows how a table is sharded.
"""
