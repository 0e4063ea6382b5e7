"""The number and choice of a run's workers, and the staleness and cost that follow (ECHO-2, arXiv 2602.02192 §3.3-3.5).

overlap        the rate at which generation overlaps training, and the staleness that follows
activation     the workers that reach that rate at the lowest price
sizing         the same while the run goes on, without flapping
estimates      measurements of a running run: T_train, T_bcast, rates, live workers
deliveries     compares the rates that workers claim with their delivered trajectories
decision       one look at the pool: activations, releases, and why
costs          what workers cost, by use: working, idle, on standby
provisioning   one answer for one budget: workers, publication period, cost, or what to change
"""
