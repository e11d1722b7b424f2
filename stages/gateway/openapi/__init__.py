"""`/openapi.json`: the description of every route, generated from the field tables that check the requests.

operations.py   what the routes are: bodies, responses and statuses
responses.py    the schemas of responses
field_texts.py  a sentence on each field
examples.py     a request and an answer of each operation
document.py     the OpenAPI 3.1 document of an application's routes
"""
