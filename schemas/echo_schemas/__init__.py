"""The records, their Avro schemas, the topics they travel on, and the codec between them. Imports nothing else of the project."""
