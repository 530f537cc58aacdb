"""The named plans, and those edited for balancers and replicas.

A new plan belongs here; what its tasks do is in ``tasks``.
"""
