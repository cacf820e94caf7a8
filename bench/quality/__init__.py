"""How near edits come to dense ones and how fast, beside what others do."""
