"""Models and the stage modules built from them: configs, deferred initialisation, weights, tied parameters.

How a model is cut is in ``split``; how ranks share a layer is in ``parallel``.
"""
