"""LoRA adapters: files of two kinds, one prepared form, and the memory that a worker group computes with."""
