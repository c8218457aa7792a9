"""Weights: checkpoints and their formats, whether they fit a model, and how they get into operators."""
