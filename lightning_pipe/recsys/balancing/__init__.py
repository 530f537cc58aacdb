"""Samples exchanged between ranks so that all have as much to do.

A balancer or a partitioning rule belongs here.
"""
