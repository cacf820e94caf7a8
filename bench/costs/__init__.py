"""What a step of a batch costs, by its composition."""
