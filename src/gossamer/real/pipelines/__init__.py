"""Replicas of several processes. The processes of a replica hold a stage each, or a shard of every
layer; the same stages of all replicas are the workers of the method. Read `replica_processes.py`
first, then `stage_session.py`; `stage_training.py` is `gossamer train` with `stages=`."""
