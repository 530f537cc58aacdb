"""Sources of batches: loaders, samplers, the ledger, resume and random streams.

Rules for loaders and samplers belong here: ``resumable_loader`` handles map-style datasets, ``stateful_loaders``
handles loaders with their own ``state_dict``. Packages outside ``loops`` import ``batch_source``, ``orphaned_workers``,
``random_streams`` and ``stateful_loaders``.
"""
