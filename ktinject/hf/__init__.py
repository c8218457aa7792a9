"""All that knows transformers' inside."""
