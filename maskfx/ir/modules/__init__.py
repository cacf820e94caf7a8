"""What is known of a module without running it: its settings, callables and hooks.

May import: ir, errors. Begin with `module_settings.py`.
"""
