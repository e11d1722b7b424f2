"""One model's engine: sequences, rows, page leases, the step loop and the step ring.

A sequence meets the modules in this order:

    submission_queue   admits it to its tenant's queue
    row_scheduler      gives it a row and requests its first pages (leases)
    page_supply        stores the granted page table
    step_loop          composes (policy/batch.py) and publishes steps with it (ring)
    completion         turns samples into output (outbox)
    sequence_table     sends its terminal event and returns row and pages
"""
