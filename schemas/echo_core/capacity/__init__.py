"""How many workers a run needs, which ones, and what follows for staleness and cost (ECHO-2, arXiv 2602.02192 §3.3-3.5).

overlap        the rate that hides generation behind training, and how old samples become
activation     which workers reach that rate at the lowest price
sizing         the same while the run goes on, without flapping
estimates      what is measured of a run that goes on: T_train, T_bcast, rates, who is alive
deliveries     whether workers deliver what they say they make
decision       one look at the pool: who is activated or released, and why
costs          what workers cost, by use: working, idle, on standby
provisioning   one answer for one budget: workers, publication period, cost, or what to change
"""
