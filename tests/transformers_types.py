"""Model types that transformers runs, for `tests/test_transformers.py` and the pages of `docs/make.py`."""

RUN = frozenset({
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_ocr2", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note", "dots3_note_text", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "flint", "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm_moe_dsa", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hy_v4_vl",
    "inkling2", "jamba", "kimi_k25", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama4_text", "longcat_flash", "mellum",
    "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mistral4", "mistral_large4", "mixtral", "muse_spark",
    "nemotron_h", "nemotron_h_omni", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "qwen3_vl_moe", "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "solar_open", "step3p7", "unlimited_ocr",
})  # fmt: skip
"""Model types of which transformers 5.24 has built source and padded output, with equal logits.

Everything else in a row was read, in its ``source``.
"""
