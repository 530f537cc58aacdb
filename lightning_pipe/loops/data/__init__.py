"""The source of batches: loaders, samplers, the ledger, resume, random streams.

A rule for loaders or samplers belongs here: ``resumable_loader`` is for map-style datasets, ``stateful_loaders`` for a
``state_dict`` of their own. Other rooms import it, ``batch_source``, ``orphaned_workers`` and ``random_streams``.
"""
