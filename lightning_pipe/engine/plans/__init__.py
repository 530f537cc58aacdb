"""Tasks and plans as data: declaration, checks, YAML, tables and pictures.

This package does not run tasks or communicate between ranks. Errors and argument checks are in ``common``.
"""
