"""What several ranks do together: comparisons, process groups, all-to-alls.

Nothing here knows of tasks or plans.
"""
