"""Lightning's own features, under every strategy."""
