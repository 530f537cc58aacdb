"""Strategies that train a language model in pipeline stages, and the modules that they train.

This package contains only code that depends on Lightning. All other code for language models is in ``llm``.
"""
