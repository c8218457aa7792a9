"""`generate` of a swapped model: transformers' own, with recorded or native steps where these are proved equal."""
