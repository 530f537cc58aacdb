"""A byte-level language model in two pipeline stages, on text that comes with Python."""
