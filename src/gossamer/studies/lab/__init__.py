"""The delay laboratory: what late gradients cost, measured over whole grids and predicted."""
