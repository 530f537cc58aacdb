"""The tasks of an iteration, the state that replays restore, and ``TrainPipeline``.

A task is an entry of ``declarations.TASKS`` and a method of ``actions.RecsysActions``. ``task_list`` builds the task
objects from them. The time and place of each task are in ``plans``.
"""
