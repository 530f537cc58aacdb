"""Checkpoints as folders: written whole, read safely, saved in the background, exported.

A checkpoint format belongs here. Nothing here needs Lightning, and nothing here knows what a model looks like:
strategies say which tensors a checkpoint holds.
"""
