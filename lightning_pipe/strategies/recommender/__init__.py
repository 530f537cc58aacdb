"""The strategy that shards TorchRec's tables and runs the recsys tasks.

Code belongs here only if it needs Lightning; the rest is in ``recsys``.
"""
