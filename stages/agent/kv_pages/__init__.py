"""KV pages that agents give each other, so that a stream that moves is not computed again.

arena_pages.py  the pages of one request, read from an engine's arena
giving.py       tickets: what this agent gives, to whom, and until when
taking.py       pages from another agent, for an engine here
http_api.py     POST /give_pages and /take_pages of orchestrators, GET /kv_pages/TICKET of agents
"""
