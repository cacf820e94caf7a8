"""Recorded steps in memory, in tiers and on disk."""
