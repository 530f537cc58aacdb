"""Which schedule, stages and micro-batches to train with."""
