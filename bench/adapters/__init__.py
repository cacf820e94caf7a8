"""Adapters in the rows of a batch."""
