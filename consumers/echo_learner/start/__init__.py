"""How a learner's session begins: the run's tip, the checkpoint to go on from, forks of other runs, and what the log lost meanwhile."""
