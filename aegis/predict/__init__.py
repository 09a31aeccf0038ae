"""Saying how fast a model will be before it is here: a probe, a trace and the simulator."""
