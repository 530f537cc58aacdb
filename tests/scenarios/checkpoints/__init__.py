"""What a checkpoint, a resume or a power cut leaves."""
