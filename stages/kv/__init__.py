"""The kv stage: owns the KV arena of every model, leases its pages to sequences, and stores sessions.

manager.py           leases: acquire, extend, commit, release, reconcile
pool/                page table, page headers, hashes, arena, sources of pages
storage/             page files: evicted and saved pages; removal of old files
sessions/            tokens of conversations, in memory and on disk
page_exchange.py     pages for other engines, and pages from them
prefix_exchange.py   the same for prefixes that many requests share
page_import.py       copies those into the arena
model.py             one version of a model: arena, manager and page files
loaded_versions.py   all versions in the record: opening, sharing, removing
stage.py             the process: sockets, frames, periodic work
cache_metrics.py     metrics
audit.py             page table against page headers, for `starling kv check`
report.py            what `starling kv` reports
inspection.py        reads arenas and files from another process
"""
