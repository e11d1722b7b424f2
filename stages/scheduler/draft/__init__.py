"""Draft tokens: prompt lookup, draft sequences on a draft model, and the decision which of them pays."""
