"""The door of another engine: the HTTP address under which the fleet reaches it.

door.py           keys, bounds, the lease, and one exchange with the engine for each request
request_body.py   the client's body, checked, as the engine's
event_stream.py   the engine's events, as text
answers.py        the text as our events and bodies
"""
