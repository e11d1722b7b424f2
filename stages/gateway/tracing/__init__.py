"""Timelines of requests: what happened to each one, in which process, and how long each phase took.

A timeline is created when a request's body has been parsed, and kept in a bounded ring after its end. `starling trace`
reads it, and the log names the requests that took longer than `tracing.slow_request_ms`.
"""
