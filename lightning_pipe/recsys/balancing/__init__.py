"""Exchanges samples between ranks so that all ranks have the same amount of work.

A balancer or a partitioning rule for samples belongs here. The balance of layers over stages is in ``pipe/balance`` and
``llm/split``. Other sub-packages and rooms import ``balancer`` only.
"""
