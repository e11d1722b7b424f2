"""Tool calls: from a request's tools (`pipeline/api/requests/tool_fields.py`) to the calls in the generated text.

fallback_prompt.py  tools as text, for templates that have no place for them
call_object.py      one call as a JSON object
function_body.py    one call's parameters in Qwen3-Coder's form
parameter_types.py  their JSON types
call_grammar.py     the constraint of answers that must be calls
call_parser.py      calls in a text, while it is being generated
"""
