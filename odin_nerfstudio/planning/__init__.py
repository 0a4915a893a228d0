"""Ahead-of-time planning: tracks, Relative Locality Graph, schedule. Imports neither nerfstudio nor torch.distributed."""
