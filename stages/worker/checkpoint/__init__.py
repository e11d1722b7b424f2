"""From a GGUF file to a checkpoint: reading GGUF, converting it, the layout of matrices, preparation."""
