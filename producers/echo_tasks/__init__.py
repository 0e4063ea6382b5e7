"""Tasks: prompts, environments, and the rewards that judge answers."""
