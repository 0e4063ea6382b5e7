"""Reading as a member of a group: the loop that polls, the worker thread, and the offsets that are done."""
