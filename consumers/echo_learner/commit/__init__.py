"""What makes a step durable and public, once: checkpoints, sessions, the log as the pointer; and how a run is taken up again."""
