"""Quotas that hold for all orchestrators together.

use_record.py   what a tenant or key has used, as the store has it
shared_use.py   what this orchestrator has used, what the others have, and what is not published yet. Pure
publisher.py    brings both together, in transactions of the store
"""
