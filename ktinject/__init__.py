"""Declarative CPU/GPU injection for Mixture-of-Experts models on stock transformers."""
