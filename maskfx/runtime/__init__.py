"""A Program and recorded steps give the results of one step, for a batch of any requests.

May import: compiler, ops, ir, config, errors. Begin with `denoiser.py`.
"""
