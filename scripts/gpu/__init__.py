"""Checks and measurements of this project on a GPU: ``make gpu``. Everything else is tested on a CPU.

``python -m scripts.gpu`` runs the parts in :mod:`scripts.gpu.parts`, each in separate processes.
"""
