"""The in-process pipe as a whole."""
