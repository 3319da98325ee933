"""The simulator: workers, network and faults in virtual time."""
