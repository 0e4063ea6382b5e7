"""The coordinator: how many workers take part, and which.

decision       one look at the pool: who shall be activated or released, and why (pure)
coordinator    what the log says goes in, orders come out
run            the process
"""
