"""Embedding tables without a fixed size: any int64 id, new rows on first use, a bounded cache over a store on disk.

``store`` holds the rows on disk, ``cache`` holds rows in memory, and ``tables`` contains the modules.
"""
