"""Models and the stage modules built from them: configs, initial values, weights, tied parameters.

Rules for cutting a model into stages are in ``split``, and sharing of layers between ranks is in ``parallel``.
"""
