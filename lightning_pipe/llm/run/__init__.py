"""Execution of a rank's stages over the micro-batches of a batch.

``preparation`` creates the stages and ``schedule_runner`` trains them. The tasks of an iteration and their plan are in
``training_tasks``. The order of the micro-batches in a step is part of the schedule, in ``schedules``.
"""
