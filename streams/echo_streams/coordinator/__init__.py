"""The coordinator: how many workers take part, and which.

coordinator    turns records of the log into orders; the rules are `echo_core.capacity`
machines       what an order does to machines: standby, processes of this machine, an autoscaler
run            the process
"""
