"""Software-pipelined training for PyTorch Lightning.

Importing this package registers its strategies with Lightning: ``Trainer(strategy="recsys_prefetch_pipeline")``.
Lightning has no entry point for strategies, so importing any sub-package also imports Lightning if it is installed. The
engine (:mod:`lightning_pipe.engine`) requires only PyTorch and works without Lightning.
"""

from importlib.util import find_spec

from lightning_pipe.environment import require_release, warn_of_clash

__version__ = "0.1.0"

warn_of_clash()

if find_spec("lightning") is not None:
    require_release("lightning", "the strategies")
    from lightning_pipe.strategies.registry import register

    register()
    del register

del find_spec, require_release, warn_of_clash
