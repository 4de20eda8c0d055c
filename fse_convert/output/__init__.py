"""Make an output appear: staged, journaled, locked, durable, renamed once."""
