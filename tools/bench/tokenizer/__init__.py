"""The benchmark of vocabularies: how long one takes to open, to encode and to decode."""
