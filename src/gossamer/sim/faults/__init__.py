"""What goes wrong in a simulated cluster: `simulated_faults` lets workers die, slow down and be cut
off; `newcomers` brings them into the run again."""
