"""Runs the stages of a rank over the micro-batches of a batch: ``preparation`` makes them, ``runner`` trains them.

The tasks of an iteration and their plan are in ``training_tasks``. The order of a step's micro-batches is the
schedule's, in ``schedules``.
"""
