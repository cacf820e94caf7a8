"""Executes one step: side graphs, the graph of a batch, its replays, and the dense module.

May import: batch, cache, backends, hardware, lora, sites, steps. Begin with `executor.py`.
"""
