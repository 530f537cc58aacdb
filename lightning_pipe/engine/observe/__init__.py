"""Spans, clocks, timelines and trace files: a record of which task ran when.

Recording and drawing what happened belongs here. Predictions of what will happen are in ``planning``, and measuring
what a task costs is in ``profiling``.
"""
