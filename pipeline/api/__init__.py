"""The HTTP API's stateless parts: fields, JSON bodies, errors, keys, quotas and server-sent events.

The gateway uses them, and so can any other process that serves the same API.  Nothing here has a socket or
imports a stage.
"""
