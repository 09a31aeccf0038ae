"""Measuring how fast a model runs, where its time goes, and what the machine would give."""
