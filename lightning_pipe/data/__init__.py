"""Batches for recommenders from columns of data."""

from __future__ import annotations

from lightning_pipe.data.jagged_collator import JaggedCollator

__all__ = ["JaggedCollator"]
