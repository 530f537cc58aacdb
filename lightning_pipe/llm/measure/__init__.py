"""Measurement of the time and memory of layers, links and ranks.

Decisions based on these measurements are in ``choice``.
"""
