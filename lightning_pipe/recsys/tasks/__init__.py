"""The tasks of an iteration, what replays restore, and ``TrainPipeline``.

A task is an entry of ``declarations.TASKS`` and a method of ``actions.RecsysActions``; ``task_list`` makes tasks for a
plan of them. When and where a task runs is in ``plans``.
"""
