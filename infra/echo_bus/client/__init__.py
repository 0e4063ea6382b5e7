"""Clients of a cluster: confluent-kafka's with their properties, publishing, transactions, requests to the cluster."""
