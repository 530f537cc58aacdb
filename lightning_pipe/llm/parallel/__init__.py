"""Parallel dimensions other than stages: data, tensor, context and expert, with their gradients.

A dimension consists of a field and a mesh in ``dimensions``, its own module, and a line in ``apply_parallel``. Other
sub-packages import ``dimensions``, ``apply_parallel``, ``context_ranks``, ``gradients`` and ``hf_documents``.
"""
