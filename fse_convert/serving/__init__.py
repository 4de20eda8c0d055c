"""Loaders for servers: the shared experts of ``OUT/fse`` go straight into the kernel's tensors, without a second copy.

`fse_convert.serving.sidecar` reads ``OUT/fse`` for all of them. Nothing here is imported by the command line.
"""
