"""Splitting a batch into micro-batches, and padding them to the same length.

This package does not depend on stages or schedules.
"""
