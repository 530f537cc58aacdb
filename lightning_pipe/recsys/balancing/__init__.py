"""Exchanges samples between ranks so that all ranks have the same amount of work.

A balancer or a partitioning rule belongs here.
"""
