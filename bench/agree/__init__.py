"""The real server beside the simulator."""
