"""The named plans, and their variants for balancers and replicas.

A plan belongs here. The tasks that it places are in ``tasks``.
"""
