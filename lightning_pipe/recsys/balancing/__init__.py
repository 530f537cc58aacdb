"""Exchange of samples between ranks so that all ranks have the same amount of work.

Balancers and partitioning rules for samples belong here. Balancing layers over stages is in ``pipe/balance`` and
``llm/split``. Other sub-packages import only ``balancer``, and only if samples are balanced.
"""
