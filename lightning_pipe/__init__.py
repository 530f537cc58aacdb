"""Software-pipelined training for PyTorch Lightning.

Importing this package registers its strategies with Lightning: ``Trainer(strategy="recsys_prefetch_pipeline")``.
Lightning has no entry point for strategies, so importing any sub-package also imports Lightning if it is installed. The
engine (:mod:`lightning_pipe.engine`) requires only PyTorch and works without Lightning.
"""

import warnings
from importlib.util import find_spec

from lightning_pipe.environment import version_problem

__version__ = "0.1.0"

# Only a warning, because the parts of this package that do not need TorchRec also work in a broken environment.
if problem := version_problem():
    warnings.warn(problem, stacklevel=2)

if find_spec("lightning") is not None:
    from lightning_pipe.strategies.registry import register_strategies

    register_strategies()
    del register_strategies

del find_spec, problem, version_problem, warnings
