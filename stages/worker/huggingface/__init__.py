"""Reads Hugging Face checkpoints as ingest reads GGUF files: metadata by GGUF keys, tensors by GGUF names.

    directory.py          the files of a directory, and which of them hold the weights
    safetensors.py        the tensors of one file
    config.py             config.json: typed access, with errors that name the field
    families.py           the model classes: names of tensors, keys of the configuration
    pooling.py            how hidden states become an embedding
    metadata.py           hyper-parameters and RoPE as GGUF keys
    vocabulary.py         tokenizer.json, tokenizer.model and what goes with them, as `tokenizer.*` keys
    tokenizer_library.py  the `tokenizers` library's reading of tokenizer.json
    source.py             all of it together: what ingest reads

Nothing here imports torch, transformers or safetensors: the format is a JSON header before plain arrays, and these
packages copy or cannot represent BF16.
"""
