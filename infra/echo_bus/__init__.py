"""The bus: everything EchoSwarm does with Kafka, over a real cluster or an in-memory one with the same interface."""
