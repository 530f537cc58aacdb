"""Runs the stages of a rank over the micro-batches of a batch.

The order in which a schedule runs them is in ``schedules``.
"""
