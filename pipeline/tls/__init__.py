"""TLS: the certificate that the server shows, and what its clients trust.

certificate.py   reads and checks a certificate and its key
follower.py      takes new files without a restart
trust.py         contexts of clients
"""
