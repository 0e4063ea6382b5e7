"""Training: the batch as arrays, the policy, DeepSpeed, ranks."""
