"""Tool calls: from the tools of a request to the calls in the text that a model generates.

tool_fields.py      the fields `tools`, `tool_choice` and `parallel_tool_calls`, and what a request keeps of them
history.py          calls and results in the messages of a chat
fallback_prompt.py  tools as text, for templates that have no place for them
formats.py          how models write calls
call_object.py      one call as a JSON object
call_grammar.py     the constraint of answers that must be calls
call_parser.py      calls in a text, while it is being generated
json_prefix.py      JSON, while it is being generated
"""
