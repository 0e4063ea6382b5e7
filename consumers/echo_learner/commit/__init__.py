"""Makes each step durable and public exactly once (checkpoints, sessions, publications), and resumes a run from there."""
