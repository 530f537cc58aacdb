"""Batches: their contents, their copy to the device, and what ranks agree on about them.

The inputs and outputs of sharded modules are in ``modules``.
"""
