"""Losses of language models and of routers."""
