"""Templates of recorded steps, and what they cost in bytes."""
