"""Assignment of modules to stages, by the names of layers or by a trace of the forward.

New split rules belong here. The stage module is in ``model``. Other sub-packages import ``by_name``, ``options``,
``stage_split`` and ``traced_split``.
"""
