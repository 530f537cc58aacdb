"""Losses of language models and of mixture-of-experts routers.

Nothing here knows stages or ranks.
"""
