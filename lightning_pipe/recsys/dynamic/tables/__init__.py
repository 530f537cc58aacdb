"""Embedding modules without a fixed size, over a cache and a store, and the mixing of ids that
distributes them over ranks.

Reading and writing rows is in ``cache`` and ``store``.
"""
