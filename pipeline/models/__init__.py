"""Model files and versions: where a model's files are, how they arrive, and which versions are loaded."""
