"""Which method, with which settings, reaches a target first on a given cluster."""
