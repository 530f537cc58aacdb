"""What a model is made of, and the part of it that a stage runs.

How a model is cut is in ``split``; how ranks share a layer is in ``parallel``.
"""
