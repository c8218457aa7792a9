"""Carries out a plan: builds the operators, fills them with weights and puts them into the model."""
