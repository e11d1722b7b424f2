"""The endpoints' formats, without HTTP: from a request's state to JSON. `pipeline/api/requests/` reads most bodies.

body_readers.py           the table of readers, and the way from bytes to their results
response_events.py        OpenAI's Responses API: its events
chat_formatter.py, completion_formatter.py   OpenAI's text endpoints
chat_tools.py             tool calls and reasoning in the answers of chats
answer_parser.py          reasoning, text and calls in a model's text
message_formatter.py      Anthropic's text endpoint
generate_formatter.py     the server's own text endpoint
response_formatter.py     the interface of their formatters
openai_formatter.py       what the formatters of chat and completions have in common
prompt_logprobs.py        the log probabilities of prompts, in each API's form
output_logprobs.py        and those of answers, encoded in parts
embedding_response.py     /v1/embeddings
rerank_response.py        /v1/rerank and /v1/score
tokenize_response.py      /v1/tokenize
"""
