"""Pure tensor functions on bytes: padding, E8M0 scales, and the kernel layout of DeepGEMM's MegaMoE, each with its inverse."""
