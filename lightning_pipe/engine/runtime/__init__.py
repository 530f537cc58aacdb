"""Runs a plan: threads, streams, order of submission, replays of tasks. Plans are built and checked in ``plans``.

``pipeline`` is the entry, public as ``SWPipeline``. Other rooms also import ``captured``, ``devices``,
``fork_garbage``, ``record_use``, ``thread_state`` and ``worker``.
"""
