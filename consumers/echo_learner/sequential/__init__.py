"""Sequential mode: the learner asks for exactly its next batch, under exactly its version."""
