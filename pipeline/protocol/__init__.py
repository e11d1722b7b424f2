"""The protocol between stages: `messages.py` has every frame, `topology.py` the table of edges."""
