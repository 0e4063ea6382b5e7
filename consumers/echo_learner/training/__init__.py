"""What computes: the batch as arrays, the policy, DeepSpeed, ranks."""
