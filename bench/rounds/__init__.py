"""Rounds on several devices against groups of a fixed size, under a simulated clock."""
