"""Validates the members of a step, and divides their arguments by sample.

May import: programs, cache, sites, steps. Begin with `validate.py`.
"""
