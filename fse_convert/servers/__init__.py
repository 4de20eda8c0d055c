"""Server releases: targets as data, the rules of their code, and their verdicts on a checkpoint."""
