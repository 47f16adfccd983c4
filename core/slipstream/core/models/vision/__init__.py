"""Images in conversations: their bytes, their pixels, and where their tokens are."""
