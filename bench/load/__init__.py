"""The server under load, with the fake model."""
