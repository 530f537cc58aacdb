"""Language models in pipeline stages: splitting, schedules, padding and loss, over PyTorch's pipelining."""
