"""Embedding modules and what goes in and out of them.

How their tables are placed is in ``sharding``.
"""
