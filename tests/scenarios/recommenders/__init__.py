"""Recommenders under the strategies: plans, ranks, tables and features together."""
