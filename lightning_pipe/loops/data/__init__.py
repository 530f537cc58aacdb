"""The source of batches: loaders, samplers, the ledger, resume, random streams.

A rule for loaders or samplers belongs here. Code that runs a batch is in ``programs``.
"""
