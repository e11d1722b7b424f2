"""What a stage reports: log lines, metrics, and its status record."""
