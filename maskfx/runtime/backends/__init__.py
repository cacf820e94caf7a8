"""Ways to run a rewritten graph."""
