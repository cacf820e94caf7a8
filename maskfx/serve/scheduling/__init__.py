"""Who runs when and where: pure functions."""
