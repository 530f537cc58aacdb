"""Scenarios of the streams of a GPU, watched on a CPU."""
