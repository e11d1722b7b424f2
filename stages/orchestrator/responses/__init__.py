"""The responses of /v1/responses, which all orchestrators of a fleet share.

use.py       how much is stored, as the coordination store counts it
store.py     responses in a blob store, bounded for each tenant and in all
keeping.py   the answer on its way to the client: it is stored before its last event
service.py   what precedes a request, and what is asked about responses
jobs.py      requests in the background, until they have ended
background.py  what runs them, whichever orchestrator dies
job_runner.py  one of them, forwarded as those of clients
works.py     all of that, for stage.py
"""
