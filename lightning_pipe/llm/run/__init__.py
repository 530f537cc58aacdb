"""Runs the stages of a rank over the micro-batches of a batch."""
