"""Decisions without I/O: admission, tenant queues, batches, costs, pacing, prefix deduplication, core sharing."""
