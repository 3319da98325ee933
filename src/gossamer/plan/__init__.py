"""What is asked before a cluster is paid for: how fast it is, what a step costs, which method wins.

`probe` measures machines and describes them as a cluster, `hardware` estimates the steps of those
that were not measured and says what fits, `cost` predicts the time of a step, `page` shows that
with sliders, and `advise` searches for the method and the settings that reach a target first.
"""
