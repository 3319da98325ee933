"""The first door: a training loop of the user's own, coupled to those of other workers.

Read `joined_worker` first (`join` and what it returns), then `loop_session`, which drives the
method's coroutine from `step()`. `binding` turns a module's parameters into one flat vector,
`gradient` reduces its gradients where they lie, `output` makes the output model, and `loop_watch`
looks at what else a loop does to its model.
"""
