"""Load or compute, per block and member: costs, plans, and the search for the one that ends first.

May import: runtime's steps, backends, batch, cache and sites, ops, ir, errors. Begin with
`plan.py`.
"""
