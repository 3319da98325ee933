"""The cost of a step in closed form, without a simulation.

Read `forms` first: the step of each method. It is built on `alpha_beta` (messages and collectives),
`queueing` (network cards that several workers use) and `pace` (compute times that vary).
`step_time` applies a form to a cluster and a model, `crossing` finds where one method overtakes
another, `work_depth` counts the operations of a model, and `agreement` compares the closed forms
with the simulator.
"""
