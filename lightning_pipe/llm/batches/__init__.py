"""A batch cut into micro-batches of one length."""
