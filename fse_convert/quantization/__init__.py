"""How a projection is stored, read from its headers first and from the config second."""
