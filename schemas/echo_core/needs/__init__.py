"""Estimates of a run's needs before anything is measured: memory, time, bytes. Pure.

model_shape    a model's numbers, from its config.json or from a table of published ones
memory         GPU memory of a learner's rank and of a worker
speed          seconds of a training step, rollouts per second of a worker, on a kind of GPU
traffic        bytes of a step on each topic, and the brokers' disk until retention
"""
