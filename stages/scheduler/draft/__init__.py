"""Draft tokens: from predictions, prompt lookup and draft models, and the decision which of them pays."""
