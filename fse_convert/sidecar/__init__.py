"""The format of ``OUT/fse`` (docs/format.md) as code."""
