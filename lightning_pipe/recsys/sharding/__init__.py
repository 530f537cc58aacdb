"""Places tables on ranks: TorchRec's planner, sharders, replicas, and the values of sharded tables.

A sharding option belongs here.
"""
