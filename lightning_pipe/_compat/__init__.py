"""Wrappers of private names of other projects, one module per project, and Lightning's fast path ``fast_hooks``.

A wrapper belongs here if no public API exists, or if the public API costs more than 3 % of a step of 10 ms. Each
wrapper has a contract test in ``tests/_compat/``, which fails with an explanation when the other project changes. These
modules do not import other sub-packages of this package.
"""
