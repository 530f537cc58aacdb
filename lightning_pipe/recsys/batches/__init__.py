"""Batches: their tensors (``traversal``), the copy to the device, and means over the tokens of all ranks.

The inputs and outputs of sharded modules are in ``modules``.
"""
