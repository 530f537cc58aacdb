"""Splits each call of a sharded module into steps that a plan can place.

A new kind of sharded module belongs here. The tasks that run the steps are in ``tasks``.
"""
