"""Replicas of several machines in virtual time. `play.py` plays a schedule on a clock;
`pipeline.py` is one replica, whose micro-batches, activations and gradients travel over the
simulated network; `lanes.py` carries what replicas tell each other, stage by stage."""
