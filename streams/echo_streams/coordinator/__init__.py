"""The coordinator: how many workers take part, and which.

coordinator    what the log says goes in, orders come out; the rules are `echo_core.capacity`
run            the process
"""
