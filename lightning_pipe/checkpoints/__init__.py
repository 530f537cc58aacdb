"""Checkpoints as folders: written whole, read safely, saved in the background, exported; without Lightning.

A format belongs here; ``strategies`` decides which tensors it has. Other rooms import ``background_save``, ``export``,
``folder_reading``, ``folder_writing``, ``inert_values``, ``named_optimizer``, ``stage_layout`` and ``whole_folder``.
"""
