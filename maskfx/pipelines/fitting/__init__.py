"""Runs of a compiled pipeline that fit forecasts, train judges or profile adapters.

May import: pipelines, runtime, ir, errors. Begin with `logged_runs.py`.
"""
