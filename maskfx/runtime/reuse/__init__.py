"""Which steps are computed, reused or extrapolated."""
