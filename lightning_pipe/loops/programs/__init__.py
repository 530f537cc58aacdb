"""Programs: the tasks of an iteration, which call Lightning's hooks.

A new kind of program belongs here. Lightning's loops themselves are one folder up.
"""
