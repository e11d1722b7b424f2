"""The stateless parts of the HTTP API, for every process that serves it. Without sockets.

json_body.py           strict JSON bodies
content_coding.py      compressed bodies, bounded in ratio
fields.py              field tables and their readers
generation_fields.py   the fields that the text endpoints have in common
requests/              from the fields of a body to a valid request, one reader for each endpoint
error_response.py      errors as responses and as events
malformed_http.py      aiohttp's connections, with the same errors for what is not valid HTTP
keys.py                API keys, tenants and scopes
key_file.py            keys that `starling keys` makes
quotas.py              limits per minute, per day and in all, of tenants and keys
fair_shares.py         bounds in total and for each tenant or address
held_bytes.py          bytes of bodies, counted for each tenant or address
forwarded.py           the address of a client behind trusted proxies
quota_file.py          what of them is used, on disk
sse.py                 encoding of server-sent events
request_name.py        id, time and seed that the sender gives a request
output_tokens.py       how an answer goes on at another engine from its tokens
output_text.py         and at one that is not ours, from its text
response_object.py     responses of OpenAI's Responses API as objects, and the messages that they become
conversation_object.py conversations as objects, their bounds, and the messages of their items
idempotency_key.py     keys of repetitions, and the digest of a body
response_context.py    how an orchestrator gives an engine the conversation before a request
item_pages.py          lists in pages
query.py               parameters of URLs
json_prefix.py         JSON while it is being generated, and the whole value of one that was cut off
page_names.py          how engines name the KV pages of a prompt to orchestrators
"""
