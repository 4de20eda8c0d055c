"""Pure tensor functions on bytes: padding, E8M0 scales, MXFP4 codes, and DeepGEMM's layout for MegaMoE, with inverses."""
