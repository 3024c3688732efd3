"""Small adapters to the trainers and libraries people already use; each imports what it adapts to."""
