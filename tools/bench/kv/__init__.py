"""The benchmark of the KV cache: the manager alone, and over HTTP."""
