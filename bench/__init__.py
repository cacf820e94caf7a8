"""Benchmarks: one script per claim; `results/` holds hardware, command, commit and figures."""
