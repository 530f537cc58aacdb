"""Schedules by name, their checks, steps and simulation.

A schedule belongs here, unless PyTorch has it.
"""
