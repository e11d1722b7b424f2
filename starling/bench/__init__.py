"""A load client for any OpenAI-compatible server: closed and open loops, traces, latencies, plots."""
