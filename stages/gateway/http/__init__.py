"""The HTTP server: routes, what happens to every request, handlers, and the sinks that write responses.

app.py                the routes
middleware.py         API key, request id, errors, headers, metrics and log of every request
context.py            the attributes that middleware and handlers share
request_body.py       reads a body within its limits of size and time
parser_pool.py        parses bodies, large ones in processes of their own
parser_process.py     such a process
errors.py             errors as responses
text_endpoints.py     handlers that generate text or resume a request
token_endpoints.py    /v1/tokenize, /v1/detokenize and /v1/messages/count_tokens
model_endpoints.py    /v1/models
probes.py             /health, /ready and metrics
message_version.py    the version of Anthropic's API
sinks.py              an event stream or a whole response
block_stream.py       an event stream of Anthropic's API
whole_response.py     writes a whole body within its limits of time and bytes
stream_backlogs.py    bytes that wait for the clients of event streams
connection.py         aiohttp's protocol, with bounded heads and half-closed connections
connection_gate.py    bounds on connections, in total and for each address
network_use.py        bytes of connections, as the kernel counts them
tls_transport.py      TLS on an accepted connection
connection_watch.py   ends connections of clients that have left or do not read
idle_connections.py   closes connections that do not finish the head of a request
"""
