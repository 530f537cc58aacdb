"""Measurement of the costs of tasks by replay.

New measurements of tasks belong here. Recording of running training is in ``observe``.
"""
