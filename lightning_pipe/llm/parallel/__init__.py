"""Parallel dimensions beside stages: data, tensor, context, experts; and gradients over them.

A new dimension belongs here.
"""
