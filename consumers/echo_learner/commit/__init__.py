"""Makes each step durable and public exactly once: checkpoints, sessions, publications."""
