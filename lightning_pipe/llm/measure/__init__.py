"""Measures time and memory of layers, links and ranks.

Decisions made from these measurements are in ``choice``.
"""
