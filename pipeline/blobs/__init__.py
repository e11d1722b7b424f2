"""Blob stores: where published models are. The rest of the project uses `BlobStore` and `open_store`.

interface.py   what every store can do, its keys and its errors
folder.py      a directory
http.py        any web server that answers ranges; read-only
ranged_get.py  ranges by HTTP, for it and for signed URLs
cloud.py       S3 and servers that are compatible with it, Azure, Google Cloud; needs the extra `cloud`
retry.py       attempts, backoff and `Retry-After`
address.py     from `fleet.blobs` to a store
"""
