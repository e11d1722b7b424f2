"""The protocol between stages: `messages/` has every frame, `topology.py` the table of edges."""
