"""What a captured step computes on a GPU."""
