"""What a module computes, found by running it."""
