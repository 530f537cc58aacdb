"""Rows on disk: stores, versions, commits, exports.

A row store belongs here; nothing here knows of tensors on a device.
"""
