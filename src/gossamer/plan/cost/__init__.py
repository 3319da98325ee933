"""What a step costs, in closed form: no clock runs and nothing is drawn.

`alpha_beta` prices messages and collectives, `queueing` cards that several use at random, `pace`
computing that varies, `forms` the steps of each method out of these, `step_time` puts a method, a
cluster and a model together, `crossing` says where one method overtakes another, `work_depth`
counts what the layers of a model compute, and `agreement` sets it all beside the simulator.
"""
