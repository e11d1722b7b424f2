"""The HTTP server: routes, what happens to every request, handlers, and the sinks that write responses.

app.py                the routes
middleware.py         API key, request id, errors, headers, metrics and log of every request
context.py            the attributes that middleware and handlers share
request_body.py       reads a body within its limits of size and time
parser_pool.py        parses bodies, large ones in processes of their own
parser_process.py     such a process
errors.py             errors as responses
text_endpoints.py     handlers that generate text or resume a request
token_endpoints.py    /v1/tokenize and /v1/detokenize
model_endpoints.py    /v1/models
probes.py             /health, /ready and metrics
sinks.py              an event stream or a whole response
connection_gate.py    bounds on connections, in total and for each address
idle_connections.py   closes connections that never send a request
"""
