"""Recovery from failures: fencing, poison-request quarantine, stall detection, reconnect backoff."""
