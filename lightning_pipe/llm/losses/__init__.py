"""Losses of language models and of mixture-of-experts routers.

This package does not depend on stages or ranks.
"""
