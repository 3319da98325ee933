"""The commands of the laboratory and of the reproductions.

Read `lab.py` or `reproduce.py` first: they are the commands. A batch of trainings that can be
stopped and continued is run by `batch.py`; `grid_batch.py` trains one grid of the laboratory,
`training_batch.py` the single trainings of a published table.
"""
