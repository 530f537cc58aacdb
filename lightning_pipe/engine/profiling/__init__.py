"""Measures what each task costs by replaying it.

A measurement of tasks belongs here. What is recorded while training runs is in ``observe``.
"""
