"""Rows in memory: slots, eviction, new rows.

An eviction rule belongs here.
"""
