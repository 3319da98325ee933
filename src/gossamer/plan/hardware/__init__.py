"""A cluster that one does not have yet: what a step takes there, and whether it fits."""
