"""Measuring, comparing and describing; nothing that a swapped model needs."""
