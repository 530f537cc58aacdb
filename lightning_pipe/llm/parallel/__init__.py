"""Parallel dimensions other than stages: data, tensor, context and expert, with their gradients.

A dimension is a field and a mesh in ``dimensions``, a module of its own, and a line in ``apply_parallel``. Other rooms
import these two, ``context_ranks``, ``gradients`` and ``hf_documents``.
"""
