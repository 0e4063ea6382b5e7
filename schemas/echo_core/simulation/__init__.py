"""A fleet in simulated time, under the rules and estimates of a live run (decision 0023).

scenario    what is simulated: learner, weights, generation, workers
weights     when a snapshot arrives at each worker
machines    one worker: up or down, what it has in hand, what it has cost
pool        who shall take part: the coordinator's rule, and others to compare it with
fleet       the simulation
tally       what is counted meanwhile
outcome     what came of it
"""
