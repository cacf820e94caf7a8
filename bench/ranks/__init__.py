"""A step over ranks."""
