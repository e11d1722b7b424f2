"""Tools of the repository: benchmarks, the reference implementation, checks, and writers of test models."""
