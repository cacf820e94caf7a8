"""Executes one step: side graphs, the graph of a batch, its replays, and the dense module.

May import: runtime/backends, runtime/batch, runtime/cache, runtime/hardware, runtime/lora,
runtime/sites, runtime/*.py, compiler, ops, ir, config, errors. Begin with `executor.py`.
"""
