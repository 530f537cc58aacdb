"""Assignment of modules to stages, by the names of layers.

New split rules belong here. The stage module is in ``model``. Other sub-packages import ``by_name``, ``options`` and
``stage_split``.
"""
