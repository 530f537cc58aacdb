"""The named plans, and their variants for balancers and replicas.

Plans belong here. The tasks that they place are in ``tasks``.
"""
