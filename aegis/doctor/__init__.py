"""What this machine is, what is wrong with it, and whether aegis computes right on it."""
