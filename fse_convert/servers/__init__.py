"""What server releases make of a checkpoint: targets as data, rules, verdicts."""
