"""PyTorch's pipeline schedules by name: lookup, checks, construction, execution and simulation.

A new schedule is a subclass of a PyTorch schedule with an entry in ``named.SCHEDULES``. The measured bubble is in
``bubble``.
"""
