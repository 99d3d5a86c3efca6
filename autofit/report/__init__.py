"""Plans for people to read."""
