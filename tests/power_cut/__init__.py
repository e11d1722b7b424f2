"""What a power cut may leave of each state file, and what its reader makes of that."""
