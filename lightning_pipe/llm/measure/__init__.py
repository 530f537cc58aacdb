"""What layers, links and ranks cost in time and memory."""
