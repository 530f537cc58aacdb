"""Embedding modules, their inputs and outputs, and the format of both on the wire.

The placement of their tables is in ``sharding``.
"""
