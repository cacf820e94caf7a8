"""Templates of a pipeline: their keys, where they are kept, and their share of a budget.

May import: masks, parts, schedules, runtime. Begin with `template_key.py`.
"""
