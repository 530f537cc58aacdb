"""Parallel dimensions other than stages: data, tensor, context and expert, with their gradients.

A dimension consists of a field and a mesh in ``parallel_dims``, its own module, and a line in ``apply_parallel``. Other
sub-packages import ``parallel_dims``, ``apply_parallel``, ``context_parallel_group``, ``gradients`` and
``hf_document_masking``.
"""
