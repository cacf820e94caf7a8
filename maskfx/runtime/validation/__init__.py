"""Validates the members of a step, and divides their arguments by sample.

May import: runtime/cache, runtime/lora, runtime/programs, runtime/sites, runtime/*.py, compiler,
ir, config, errors. Begin with `validate.py`.
"""
