"""Stream processors: rewards, the stale filter, the coordinator."""
