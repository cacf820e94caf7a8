"""Continuous batching: the steps of many requests, each running its own pipeline's code."""
