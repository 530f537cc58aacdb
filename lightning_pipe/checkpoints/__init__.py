"""Checkpoint folders: atomic writes, safe reads, background saves and export. Independent of Lightning.

File formats belong here; ``strategies`` chooses the tensors that a checkpoint holds. Other sub-packages import
``background_save``, ``export``, ``folder_reading``, ``folder_writing``, ``optimizer_state``, ``remote_folder``,
``safe_reading``, ``stage_layout`` and ``atomic_folder``.
"""
