"""Embedding modules, their inputs and outputs, and the formats in which both are sent.

The placement of their tables is in ``sharding``.
"""
