"""Programs: the tasks of an iteration, which call Lightning's hooks.

A new kind of program belongs here. The subclasses of Lightning's loops are in the parent folder.
"""
