"""The catalog: what has been published to the blob store of a fleet.

entry.py       one published model: what its manifest contains, and the keys of its blobs
publish.py     puts a prepared model into the store
contents.py    reads the catalog, removes an entry, keeps the listing for stores that cannot list
adapter_entry.py    one published LoRA adapter
adapters.py         the same three for adapters
pulled.py, pulled_adapters.py    what of it is on this machine
"""
