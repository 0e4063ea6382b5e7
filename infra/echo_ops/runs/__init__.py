"""The runs of a namespace: listing, archiving, restoring and removing them."""
