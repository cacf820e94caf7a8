"""Schedulers and routers under a simulated clock."""
