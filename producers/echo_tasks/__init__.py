"""What is asked of the policy and how answers are judged: prompts, environments, checkers."""
