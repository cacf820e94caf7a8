"""What the compiler and the runtime both know."""
