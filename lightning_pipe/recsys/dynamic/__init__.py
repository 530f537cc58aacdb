"""Embedding tables without a fixed size: any int64 id, new rows on first use, a bounded cache over a store on disk.

``store`` is the disk, ``cache`` is the memory, ``tables`` are the modules.
"""
