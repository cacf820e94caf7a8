"""Run a Program with recorded steps: compute one denoiser step for a batch of requests.

May import: compiler, ops, ir, config, errors. Begin with `denoiser.py`.
"""
