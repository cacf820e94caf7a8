"""Load or compute, per block: plans, costs and the search."""
