"""The graph inputs of one batch, and what they cost."""
