"""Rewrite of each sharded module call into steps that a plan can place.

Support for new kinds of sharded modules belongs here. The tasks that run the steps are in ``tasks``.
"""
