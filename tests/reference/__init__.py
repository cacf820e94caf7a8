"""Tests of bench/reference: data, training, and what is shipped."""
