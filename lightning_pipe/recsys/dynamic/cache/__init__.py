"""Rows in memory: slots, eviction, initial values of new rows.

Eviction rules belong here.
"""
