"""Patches reused across steps: speed against likeness, beside fewer steps and other caches."""
