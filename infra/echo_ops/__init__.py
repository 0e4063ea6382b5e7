"""What operators use: the command line, topics and ACLs as code, the supervisor of a local run."""
