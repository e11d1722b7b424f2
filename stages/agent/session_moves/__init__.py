"""Sessions that move to another agent. An orchestrator decides which, and carries what is sent.

engine_sessions.py  the calls of this agent's engines
http_api.py         POST /list_sessions, /give_session, /take_session and /move_session of orchestrators
"""
