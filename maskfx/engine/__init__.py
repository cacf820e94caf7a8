"""Continuous batching: execute denoiser steps of many requests, each in its pipeline's own code.

May import: pipelines, runtime, errors. Begin with `engine.py`.
"""
