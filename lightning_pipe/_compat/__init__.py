"""Private names of other projects, one project a module; Lightning's fast path is ``quick_lightning``.

A wrapper belongs here if a public way costs more than 3 % of a step of 10 ms, or if there is none. Each has a contract
test in ``tests/_compat/``, which fails with a sentence when the other project changes. Nothing here imports a room.
"""
