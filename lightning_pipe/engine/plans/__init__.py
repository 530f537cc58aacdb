"""Tasks and plans as data: declaration, checks, YAML, tables and pictures.

Nothing here runs a task or talks to another rank. Errors and argument checks are in ``common``.
"""
