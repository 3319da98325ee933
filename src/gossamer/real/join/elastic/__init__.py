"""Workers that come to a loop during the run, and what becomes of the samples of the dead."""
