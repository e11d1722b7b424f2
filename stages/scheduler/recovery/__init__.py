"""Recovery from failures: fencing, poison-request quarantine, stall detection, starvation, reconnect backoff."""
