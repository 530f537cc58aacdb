"""Execution of a plan: threads, streams, submission order, task replays. Plans are built and checked in ``plans``.

The entry point is ``pipeline``, public as ``SWPipeline``. Other sub-packages also import ``captured``, ``devices``,
``fork_garbage``, ``record_stream``, ``thread_state`` and ``worker``.
"""
