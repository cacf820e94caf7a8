"""Templates of a pipeline: their keys, where they are kept, and their share of a budget.

May import: pipelines/masks, pipelines/parts, pipelines/schedules, pipelines/*.py, runtime,
errors. Begin with `template_key.py`.
"""
