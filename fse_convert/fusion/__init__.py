"""Whether a server fuses a layer's shared expert, and why not: rules and server releases."""
