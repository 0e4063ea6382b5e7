"""The learning plane: batches, losses, the trainer, checkpoints, the publisher."""
