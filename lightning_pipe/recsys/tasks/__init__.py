"""The tasks of an iteration, what replays restore, and ``TrainPipeline``.

A task belongs here. When and where it runs is in ``plans``.
"""
