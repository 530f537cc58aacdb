"""Decides which modules each stage holds: by the names of layers, or by a trace of the forward.

A split rule belongs here. The stage module itself is in ``model``. Other rooms import ``by_name``, ``options``,
``stage_split`` and ``traced_split``.
"""
