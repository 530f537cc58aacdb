"""The strategies that train a language model in pipeline stages, and the modules that they train.

Code belongs here only if it needs Lightning; the rest is in ``llm``.
"""
