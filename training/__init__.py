"""The reference pipelines: their data, their training, and how the shipped weights are built."""
