"""Which modules each stage holds.

A split rule belongs here.
"""
