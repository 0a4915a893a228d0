"""Rendering: gsplat on CUDA, the package's own rasterizer of equal meaning elsewhere."""
