"""Plans of all kinds, and interruptions, through the whole engine."""
