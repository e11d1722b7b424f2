"""Sessions: tokens of conversations.

session_files.py    a session, and its file of records
session_store.py    the sessions of one tokenizer: turns, bounds, expiry
model_sessions.py   the sessions of a model through all its versions; frames and answers
"""
