"""A batch: what it holds, how it reaches the device, what ranks agree on about it.

What a sharded module makes of a batch is in ``modules``.
"""
