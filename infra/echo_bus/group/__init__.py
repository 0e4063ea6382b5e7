"""Reading as a member of a group: the loop that polls, the thread that works, and which offsets are done."""
