"""What is done with a batch, as tasks that call Lightning's hooks.

A new kind of program belongs here; Lightning's loops themselves are one folder up.
"""
