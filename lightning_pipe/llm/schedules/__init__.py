"""PyTorch's pipeline schedules by name: lookup, checks, construction, execution and simulation.

A new schedule is a class of PyTorch, or one that derives from ``_compat.pipelining.RuntimeSchedule`` and calls
``set_schedule_actions`` in its constructor, with an entry in ``specs.SCHEDULES``. The measured bubble is in ``bubble``.
"""
