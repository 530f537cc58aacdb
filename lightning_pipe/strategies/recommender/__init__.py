"""Strategy that shards TorchRec tables and trains under a recsys plan.

Code belongs in this package only if it needs Lightning; all other code for recommenders is in ``recsys``.
"""
