"""What the linear operators share."""
