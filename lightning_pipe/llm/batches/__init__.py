"""Cuts a batch into micro-batches and pads them to one length.

Nothing here knows stages or schedules.
"""
