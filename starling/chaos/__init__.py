"""Faults on purpose, against a live server, and a comparison of every byte (`starling chaos`)."""
