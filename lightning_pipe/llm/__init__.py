"""Language models in pipeline stages: splitting, schedules, padding and loss, over PyTorch's pipelining.

Sub-packages, lowest first: ``losses``, ``model``, ``batches``, ``parallel``, ``schedules``, ``measure``, ``split``,
``run``, ``choice``. This package does not depend on Lightning.
"""
