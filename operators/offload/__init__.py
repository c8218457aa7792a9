"""CPU and GPU working together on one layer."""
