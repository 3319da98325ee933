"""What a loop needs for large batches: a scaled learning rate, and BatchNorm over all workers."""
