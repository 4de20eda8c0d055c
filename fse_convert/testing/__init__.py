"""What tests of this package and of programs that use it need: made-up checkpoints, damaged ones, and faults of the file system.

``python -m fse_convert.testing OUT --kind v4.1-flash --layers 2`` writes a checkpoint. Nothing else in the package imports this.
"""
