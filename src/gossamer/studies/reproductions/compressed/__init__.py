"""Published tables of compressed training: bits of displacements, and error against bytes."""
