"""The responses of /v1/responses, which all orchestrators of a fleet share.

use.py       how much is stored, as the coordination store counts it
tenant_blobs.py  blobs in a blob store, bounded for each tenant and in all
store.py     responses as such blobs
heads.py     which blob is a conversation's present value
conversation.py  what one is, and how changes make the next. Pure
conversation_store.py  changes that orchestrators make at once, none lost
turns.py     one response at a time continues a conversation
keeper.py    a complete response: its items in the conversation, once, and then the response
shared.py    all of these
keeping.py   the answer on its way to the client: it is stored before its last event
service.py   what precedes a request, and what is asked about responses
jobs.py      requests in the background, until they have ended
background.py  what runs them, whichever orchestrator dies
job_runner.py  one of them, forwarded as those of clients
works.py     all of that, for stage.py
"""
