"""The benchmark of models on demand: from a request to the first token of a model that is not loaded."""
