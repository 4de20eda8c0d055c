"""fse-convert makes a MoE checkpoint's shared experts run fused in the server, and proves that they will."""

__version__ = "0.1.0"
