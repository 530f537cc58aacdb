"""Rows in memory: slots, eviction, initial values of new rows.

An eviction rule belongs here.
"""
