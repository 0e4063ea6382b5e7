"""How many workers a run needs, which ones, and what follows for staleness and cost (ECHO-2, arXiv 2602.02192 §3.3-3.5).

overlap        the rate that hides generation behind training, and how old samples become
activation     which workers reach that rate at the lowest price
sizing         the same while the run goes on, without flapping
provisioning   one answer for one budget: workers, publication period, cost, or what to change
simulation     a fleet in simulated time, to see what the rules are worth
"""
