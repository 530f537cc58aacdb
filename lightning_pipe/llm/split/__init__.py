"""Assignment of modules to stages, by the names of layers.

New split rules belong here. The stage module is in ``model``. Other sub-packages import ``stage_fqns``, ``options`` and
``stage_split``.
"""
