"""Chooses schedule, stages, number of micro-batches and split from measured costs.

A rule for choosing belongs here. The measurements are in ``measure``.
"""
