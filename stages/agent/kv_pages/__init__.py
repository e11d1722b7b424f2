"""KV pages that agents give each other, so that a stream that moves and the prefixes of an agent that drains
are not computed again.

arena_pages.py  the pages of one request, read from an engine's arena
giving.py       tickets: what this agent gives, to whom, and until when
taking.py       pages from another agent, for an engine here
http_api.py     the calls of orchestrators, and GET /kv_pages/TICKET of agents
"""
