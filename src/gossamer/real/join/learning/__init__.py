"""What a loop learns from the other workers beside its labels: their predictions, their losses."""
