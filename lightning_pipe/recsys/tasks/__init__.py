"""The tasks of a training iteration, what replays restore, and ``TrainPipeline``.

A new task belongs here.
"""
