"""The benchmark over HTTP: the server under test, the baseline, clients, workloads and scenarios."""
