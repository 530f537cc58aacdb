"""Decides which modules each stage holds.

A split rule belongs here. The stage module itself is in ``model``.
"""
