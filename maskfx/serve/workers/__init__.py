"""Worker processes and the link to them."""
