"""Batches for recommenders from columns of data."""

from __future__ import annotations

from lightning_pipe.environment import import_torchrec

import_torchrec()  # its errors name the commands that install it

from lightning_pipe.data.jagged_collator import JaggedCollator  # noqa: E402

__all__ = ["JaggedCollator"]
