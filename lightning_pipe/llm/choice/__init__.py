"""Choice of schedule, stages, number of micro-batches and split from measured costs.

Rules for this choice belong here. The measurements are in ``measure``.
"""
