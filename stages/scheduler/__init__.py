"""The scheduler stage: queues, batches and the step loop of every loaded model version.

core/       one engine: sequences, rows, leases, the step loop, the step ring
policy/     decisions without I/O: admission, tenant queues, batches, costs, pacing, sharing of cores
draft/      draft tokens: predicted texts, prompt lookup, draft sequences on a draft model, and when they pay
recovery/   fencing of worker groups, poison-request quarantine, stall detection, starvation, reconnect backoff
stage.py    the sockets, and the loop over all engines
"""
