"""Software-pipelined training for PyTorch Lightning.

Importing this package registers its strategies with Lightning: ``Trainer(strategy="recsys_prefetch_pipeline")``. The
engine (:mod:`lightning_pipe.engine`) needs PyTorch alone.
"""

from importlib.util import find_spec

__version__ = "0.1.0"

if find_spec("lightning") is not None:
    from lightning_pipe.strategies.registry import register

    register()
    del register

del find_spec
