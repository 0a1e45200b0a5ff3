"""SMC speculative decoding for unmodified SGLang."""
