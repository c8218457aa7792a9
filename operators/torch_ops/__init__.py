"""Custom ops for tracing and gradients, and what is computed with torch alone."""
