"""The door of another engine: the HTTP address under which the fleet reaches it.

door.py           keys, bounds, the lease, and one exchange with the engine for each request
request_body.py   the client's body, checked, as the engine's
answer_form.py    what its answer may have besides text, and whether another engine can go on with it
event_stream.py   the engine's events, as pieces of the answer's choices
answer_parts.py   tool calls and log probabilities of an event, and of a whole choice
answers.py        the pieces as our events and bodies
"""
