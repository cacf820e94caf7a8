"""From a module to a Program."""
