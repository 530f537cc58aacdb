"""Rows on disk: stores, versions, commits, exports.

A row store belongs here. Nothing here knows tensors on a device.
"""
