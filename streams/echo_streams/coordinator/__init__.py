"""The coordinator: how many workers take part, and which.

coordinator    what the log says goes in, orders come out; the rules are `echo_core.capacity`
machines       what an order means for machines: standby, processes of this machine, an autoscaler
run            the process
"""
