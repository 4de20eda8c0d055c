"""vLLM's AITER fused shared experts on ROCm: which configuration it reads, and what it decides."""
