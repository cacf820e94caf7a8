"""Continuous batching: execute denoiser steps of many requests, each in its pipeline's own code.

May import: scheduling, pipelines, distributed, runtime, ir, config, errors. Begin with `engine.py`.
"""
