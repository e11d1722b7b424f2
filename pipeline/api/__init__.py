"""The stateless parts of the HTTP API, for every process that serves it. Without sockets.

json_body.py           strict JSON bodies
content_coding.py      compressed bodies, bounded in ratio
fields.py              field tables and their readers
generation_fields.py   the fields that the text endpoints have in common
error_response.py      errors as responses and as events
keys.py                API keys and tenants
quotas.py              token buckets per tenant
fair_shares.py         bounds in total and for each tenant or address
quota_file.py          the buckets' levels on disk
sse.py                 encoding of server-sent events
"""
