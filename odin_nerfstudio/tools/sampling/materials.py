"""Numbers of the materials, shared by the builders of the scenes and the texture functions."""

from __future__ import annotations

# City
FIELD, STREET, BLOCK, PARK, FACADE, ROOF, TILES, FOLIAGE, TRUNK, PAINT, MACHINE = range(11)
# Object
PAVING, WALL, STONE, ROCK, MOSAIC, GLAZE, WOOD, BALL, POT = range(20, 29)

#: Distance between the streets of the city and their width with the kerbs, metres.
BLOCK_PERIOD, STREET_WIDTH = 64.0, 16.0
