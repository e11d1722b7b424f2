"""The stages, one package per kind of process. Each has a `stage.py` with `main(config)`; none imports another."""
