"""The gateway: HTTP in, server-sent events out, and the state of every request in flight.

The path of a chat request, by file:

     1  http/app.py                   finds the route
     2  http/middleware.py            checks the API key, assigns the request id, turns exceptions into error bodies
     3  http/text_endpoints.py        reads the body, then awaits the end of the response
     4  pipeline/api/requests/chat.py   checks the body's fields and returns a `GenerationRequest`
     5  admission/admit.py            readiness, quotas, session, tokens, lengths; returns the request's state
     6  requests/spec.py, state.py    what the request asks for (frozen), and what changes until it ends
     7  requests/lifecycle.py         looks in the response cache and starts the request
     8  requests/journal.py           stores the `RequestSpec`, so that a successor of this process can continue
     9  requests/relay.py             sends one `Submit` for each sequence to the scheduler, receives `Tokens`
    10  requests/text_decoder.py      turns tokens into text, holding back what a later token can change
    11  http/sinks.py                 gives each event an id that a client can resume from, and writes it
    12  endpoints/openai_formatter.py   formats the event as JSON

`stage.py` owns the process: the listening socket and the connections to tokenizer, scheduler and KV manager. It passes
their frames to `service.py`, which constructs the objects above and connects them.

A client that lost its connection comes in through 1 to 3 and continues at 11: `requests/resume.py` finds the request,
waits until it has reached the client's event, and adds a sink to it. After a restart `requests/recovery.py` continues
from the journal at 9.
"""
