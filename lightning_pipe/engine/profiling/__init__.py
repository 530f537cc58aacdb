"""Measures what each task costs, by replaying it."""
