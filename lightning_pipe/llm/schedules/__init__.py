"""PyTorch's schedules by name: find, check, build, run, simulate.

A new one is a class of PyTorch's kind with an entry in ``named.SCHEDULES``. The measured bubble is in ``bubble``.
"""
