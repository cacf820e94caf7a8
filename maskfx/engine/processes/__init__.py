"""Processes beside the engine: helpers for encoders and VAE, and nets whose steps they compute.

May import: pipelines, runtime, ir, config, errors. Begin with `step_process.py`.
"""
