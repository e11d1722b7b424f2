"""Requests from their admission until their answers expire.

spec.py                 what an admitted request asks for; what the journal stores
state.py                what changes while it is in flight: tokens, text, outcome; the interface of sinks
output.py               the output of an ended sequence; what replay buffer and response cache store
prompt_scores.py        the log probabilities of a prompt's tokens
responses.py            stores responses, and joins those that continue a conversation
stored_responses.py     the file of the stored responses
stored_sizes.py         the bytes of each tenant in it
stored_conversations.py   conversations in the same file
lifecycle.py            start and end of a request
relay.py                requests in flight: submits them to the scheduler and turns tokens into text
text_decoder.py         tokens to text, with stop strings
sequence_text.py        stores the text of a sequence and passes it on
reasoning_budget.py     where the reasoning of an answer is ended
token_bytes.py          the bytes of each token of a vocabulary
sessions.py             turns of sessions at the KV manager
response_cache.py       answers by everything that determines them
journal.py              the file that survives this process
state_writer.py         the thread that writes journal and quotas
replay_buffer.py        answers of ended requests
recovery.py             continues the journal's requests after a restart
readers.py              several sinks of one request, or none for the time being
event_cursor.py         the id of an event
page_namer.py           the pages of a prompt, for orchestrators
continued.py            goes on from the output of another server
resume.py               finds a request and attaches a reader at an event
"""
