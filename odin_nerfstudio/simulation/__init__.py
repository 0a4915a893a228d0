"""Simulation of a training job: the planner, staging, gates and policies themselves on a virtual clock."""
