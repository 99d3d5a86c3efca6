"""What is claimed, measured again: commands that print figures and fail when they are not met."""
