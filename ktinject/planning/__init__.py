"""What a rule file makes of a model, before anything is changed."""
