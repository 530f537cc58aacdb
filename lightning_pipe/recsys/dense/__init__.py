"""The dense parameters: their values, and their gradients over ranks and batches."""
