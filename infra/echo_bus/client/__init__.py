"""Clients of a cluster: confluent-kafka's and what is configured for them, publishing, transactions, questions to the cluster."""
