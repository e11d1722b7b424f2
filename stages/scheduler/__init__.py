"""The scheduler: queues, batches and the step loop of every model.

sequence.py   one line of tokens and its state machine
queues.py     who waits: tenants, their shares, bounds
batch.py      who computes: the entries of one step under its budget
cost.py       what a step will cost, learned from those that ran
leases.py     pages: what was asked of `kv`, what was granted, what must be declared again
admission.py  what can never be computed here, with the reason
door.py       the gateways' side: submissions, cancels, overload
siblings.py   prompts that begin alike: once is enough
speculate.py  draft tokens by prompt lookup
companion.py  sequences that a draft model computes for another model's
drafting.py   which of the two sources is asked, and whether it pays
pairing.py    which model drafts for which
retry.py      whose fault it is when a step kills the worker
ring.py       the step arena as this side writes and reads it
engine.py     one model: the above put together; frames and outputs in, steps and frames out
stats.py      counters and histograms
metrics.py    what is shown of it
fence.py      the end of a worker group, waited for
host.py       one model as the stage runs it: arena, worker group, kv
stage.py      the sockets and the loop
"""
