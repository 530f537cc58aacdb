"""Embedding modules without a size, over a cache and a store."""
