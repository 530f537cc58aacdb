"""Batches: their tensors (``pieces``), the copy to the device, and means over the tokens of all ranks.

The inputs and outputs of sharded modules are in ``modules``.
"""
