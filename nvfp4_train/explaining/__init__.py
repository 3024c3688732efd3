"""What a recipe saves, where its risks are and how to verify it, in plain words and numbers."""
