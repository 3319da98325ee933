"""Commands that make one model of several."""
