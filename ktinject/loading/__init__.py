"""A plan carried out: operators built, filled and put into the model."""
