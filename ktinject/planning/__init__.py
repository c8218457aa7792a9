"""Plans what a rule file does to a model, before anything is changed."""
