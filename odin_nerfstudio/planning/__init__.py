"""Ahead-of-time planning: tracks, Relative Locality Graph, schedule. No nerfstudio, no torch: numpy in, numpy out."""
