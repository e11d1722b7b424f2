"""HTTP in, server-sent events out; the record of every request in flight."""
