"""Recorded steps under one name, and the bytes that they take and may take.

May import: runtime's steps, batch, cache, planner and sites, ir, errors. Begin with `templates.py`.
"""
