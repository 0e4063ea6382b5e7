"""A fleet in simulated time, under the rules and estimates of a live run (decision 0023).

scenario    the input: learner, weights, generation, workers
weights     the time at which a snapshot arrives at each worker
machines    one worker: its state, its groups in hand, its cost
pool        the choice of active workers: the coordinator's rule, and others to compare it with
fleet       the simulation
tally       its counters
outcome     its result
"""
