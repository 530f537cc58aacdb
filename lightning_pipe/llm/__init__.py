"""Language models in pipeline stages: splitting, schedules, padding and loss, over PyTorch's pipelining.

Sub-packages, lowest first: ``losses``, ``model``, ``batches``, ``parallel``, ``schedules``, ``measure``, ``split``,
``run``, ``choice``. Nothing here needs Lightning.
"""
