"""Which rank holds which rows: TorchRec's planner, sharders, replicas, and the values of sharded tables.

A sharding option belongs here.
"""
