"""Decode steps on the CPU."""
