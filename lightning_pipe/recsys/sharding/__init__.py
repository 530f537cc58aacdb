"""Placement of tables on ranks: TorchRec's planner, sharders, replicas, and the values of sharded tables.

Sharding options belong here.
"""
