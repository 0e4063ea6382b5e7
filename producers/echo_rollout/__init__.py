"""The rollout plane: feeder, workers and their engines."""
