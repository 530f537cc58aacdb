"""Where batches come from: sources, the ledger, resume, random streams, what ranks say of their next batch.

A rule about samplers or loaders belongs here; what runs a batch is in ``programs``.
"""
