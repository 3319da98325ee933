"""Memory: what a run needs (`forecast`), and runs whose tensors need none (`shapes`)."""
