"""Plans: load or compute, per block and member; costs, and the search for the fastest plan.

May import: runtime's steps, backends, batch, cache and sites, ops, ir, errors. Begin with
`plan.py`.
"""
