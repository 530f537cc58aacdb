"""Spans, clocks, timelines and trace files: a record of which task ran when.

Recording and drawing of executed tasks belong here. Predictions are in ``planning``, and measurements of task costs
are in ``profiling``.
"""
