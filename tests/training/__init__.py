"""Tests of training: data, training, and what is shipped."""
