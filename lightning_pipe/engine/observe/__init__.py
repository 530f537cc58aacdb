"""What ran when: spans, clocks, timelines and their files.

Nothing here decides what runs; costs and predictions are in ``planning``.
"""
