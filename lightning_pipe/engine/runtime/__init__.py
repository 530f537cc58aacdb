"""Runs a plan: threads, streams, the order of submission, and replays of tasks.

What a plan is, and whether it is right, is in ``plans``.
"""
