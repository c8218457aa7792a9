"""A loaded model for people and programs: a conversation in the terminal, and a server."""
