"""Runs a plan: threads, streams, order of submission, replays of tasks.

Whatever happens while a plan runs belongs here. Building and checking plans is in ``plans``.
"""
