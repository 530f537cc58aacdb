"""Embedding tables without a size: any int64 id, rows made at first sight, a bounded cache over a store on disk."""
