"""Splits the calls of sharded modules into steps that a plan can place.

The tasks that take these steps are in ``tasks``.
"""
