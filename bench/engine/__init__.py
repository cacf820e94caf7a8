"""The engine beside diffusers."""
