"""Active sites of masks, and what masks may be."""
