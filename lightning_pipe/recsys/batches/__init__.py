"""Batches: the tensors in them (``pieces``), their copy to the device, and means over the tokens of all ranks.

The inputs and outputs of sharded modules are in ``modules``.
"""
