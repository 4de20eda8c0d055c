"""Loaders for servers: the shared experts of ``OUT/fse`` go straight into the kernel's tensors, without a second copy.

`fse_convert.serving.sidecar` opens ``OUT/fse`` for all of them; each server has a package. The command line imports none of it.
"""
