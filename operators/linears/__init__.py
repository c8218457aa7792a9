"""Base classes and weight layouts of the linear operators."""
