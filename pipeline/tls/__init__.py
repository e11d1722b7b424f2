"""TLS: the certificate that the server shows, and what its clients trust.

certificate.py   reads and checks a certificate and its key
follower.py      takes new files without a restart
kept.py          keeps the certificate in use for the next gateway
trust.py         contexts of clients
skipped_trust.py imports without the certificates of clients
"""
