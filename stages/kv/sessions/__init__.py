"""Sessions: tokens of conversations.

session_files.py    a session, and its file of records
session_store.py    the sessions of one tokenizer: turns, bounds, expiry
session_moves.py    what goes to another agent, and the states of a session that moves
session_transfer.py what the engines of both agents do with it
session_bounds.py   how many sessions and bytes, in all and for each tenant
model_sessions.py   the sessions of a model through all its versions; frames and answers
session_thread.py   the thread that executes them
"""
