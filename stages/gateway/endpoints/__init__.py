"""The endpoints' formats, without HTTP: from the fields of a body to a request, and from its state to JSON.

chat.py, completions.py   OpenAI's text endpoints
chat_tools.py             tool calls and reasoning in the answers of chats
answer_parser.py          reasoning, text and calls in a model's text
messages.py               Anthropic's text endpoint: its requests
message_formatter.py      and its responses
conversations.py          conversations: bodies and items
generate.py               the server's own text endpoint
response_formatter.py     the interface of their formatters
openai_formatter.py       what the formatters of chat and completions have in common
prompt_logprobs.py        the log probabilities of prompts, in each API's form
tokenize.py               /v1/tokenize and /v1/detokenize
session_close.py          /v1/session/close
body_readers.py           the table of readers, and the way from bytes to their results
"""
