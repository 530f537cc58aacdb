"""Parallel dimensions other than stages: data, tensor, context and expert, with their gradients.

A parallel dimension belongs here.
"""
