"""Embedding modules without a fixed size, over a cache and a store.

Reading and writing rows is in ``cache`` and ``store``.
"""
