"""Reasoning: what models that think write before their answers, between two marks that the chat template names.

switch.py            the variables of the chat template that turn it on or off
reasoning_parser.py  reasoning and answer in a text, while it is being generated
"""
