"""Tasks and plans as data: declaration, checks, YAML, tables and pictures.

The errors and argument checks that every room uses are here too. Nothing here runs a task or talks to another rank.
"""
