"""Rows on disk: stores, versions, commits, exports.

A store is a subclass of ``row_store.RowStore``, and ``open_store`` in ``tables/create_row_tables`` opens it. Its keys
and records are NumPy arrays.
"""
