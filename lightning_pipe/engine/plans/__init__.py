"""Tasks and plans as data: declared, checked, written and drawn; and the errors and small checks that every room uses.

Nothing here runs a task or asks another rank.
"""
