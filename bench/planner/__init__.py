"""Plans beside those of FlashPS's Algorithm 1."""
