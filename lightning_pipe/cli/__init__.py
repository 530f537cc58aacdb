"""The command ``lightning-pipe``."""
