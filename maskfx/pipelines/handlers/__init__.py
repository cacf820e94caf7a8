"""What denoiser and autoencoder calls of a run become: dense calls, recordings, edits, patches.

May import: pipelines/masks, pipelines/parts, pipelines/schedules, pipelines/templates,
pipelines/*.py, runtime, ir, errors. Begin with `call_handler.py`.
"""
