"""`echoswarm simulate`: a fleet of workers in simulated time (decision 0023).

file         the TOML file of a scenario
figures      an outcome as plain data and as a table
paper        ECHO-2's figures and table, from its set-up
page         one HTML page with the curves
scenarios/   shipped scenarios
"""
