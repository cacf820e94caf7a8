"""Continuous batching: the steps of many requests, each running its own pipeline's code.

May import: pipelines, runtime, errors. Begin with `engine.py`.
"""
