"""Fault injection against a running server, with a comparison of every byte (`starling chaos`)."""
