"""Training on clusters: schedulers, launchers and storage of several machines."""
