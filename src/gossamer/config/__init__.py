"""What a user chooses for a run: the cluster, its faults, and the settings of one training.

Read `settings` first: `make_settings` turns names into a checked `Settings`. `cluster` describes
machines and links (`clusters/` has those that come with the package), `faults` what breaks.
"""
