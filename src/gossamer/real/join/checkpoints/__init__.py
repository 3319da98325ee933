"""Checkpoints of a user's loop: `loop_checkpoints` has the files, and what is in them."""
