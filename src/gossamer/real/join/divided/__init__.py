"""Loops over replicas of several processes: islands over which PyTorch has sharded the model, and
pipelines of which each process trains a stage. `stage_loop` begins with the choice."""
