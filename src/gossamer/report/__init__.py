"""What a person reads after a run: folders, statistics, pictures."""
