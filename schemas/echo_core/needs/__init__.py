"""Estimates of a run's needs before anything is measured: memory, time, bytes, disk. Pure.

model_shape    a model's numbers, from its config.json or from a table of published ones
memory         GPU memory of a learner's rank and of a worker
speed          seconds of a training step, rollouts per second of a worker, on a kind of GPU
renting        workers of a sequential run; one GPU for learner and worker
fitting        the least change with which a learner's rank fits into a GPU
arrival        the least change with which new weights arrive in time
disk           a checkpoint, and all that lie on the learner's disk at once
traffic        bytes of a step on each topic, and the brokers' disk until retention
amounts        all of these as text
"""
