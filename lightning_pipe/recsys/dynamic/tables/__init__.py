"""Embedding modules without a fixed size, over a cache and a store, and the mixing that distributes ids over ranks.

Reading and writing rows is in ``cache`` and ``store``.
"""
