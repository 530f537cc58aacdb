"""Schedules by name, their checks, their steps, and their simulation.

A new schedule belongs here.
"""
