"""A training checkpoint as a Hugging Face folder of packed FP4 weights that serving engines load, and back."""
