"""What denoiser and autoencoder calls of a run become: dense calls, recordings, edits, patches.

May import: masks, parts, schedules, templates, runtime. Begin with `call_handler.py`.
"""
