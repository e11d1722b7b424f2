"""Constrained output: grammars are vetted in one helper process, and another one writes the token masks."""
