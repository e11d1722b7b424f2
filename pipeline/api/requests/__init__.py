"""From the fields of a body to a valid request, for every process that serves the API.

The orchestrator refuses a bad body before a model is loaded for it, with the error that the gateway would give.

readers.py              the table of readers, by endpoint
generation_request.py   a valid request for text, the same for all endpoints
chat.py, completions.py, generate.py, messages.py   the endpoints that generate text
responses.py, response_items.py, conversations.py   OpenAI's Responses API
embeddings.py, rerank.py, tokenize.py, session_close.py   the others
prompt_field.py         the field `prompt`
template_fields.py      what goes to the chat template besides messages
reasoning_fields.py     what a request says of reasoning, and what is kept of that
tool_fields.py          `tools`, `tool_choice` and `parallel_tool_calls`, and what a request keeps of them
tool_history.py         calls and results in the messages of a chat
tool_formats.py         how models write calls
context_edits.py        `context_management` of /v1/messages
"""
