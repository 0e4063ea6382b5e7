"""The runs of a namespace: which there are, what is wanted of them, and how one is removed."""
