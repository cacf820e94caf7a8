"""The routes of the HTTP app."""
