"""Measures ingest: `python -m tools.bench.ingest`."""
