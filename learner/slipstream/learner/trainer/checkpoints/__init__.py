"""What the trainer stores and finds again, in any layout."""
