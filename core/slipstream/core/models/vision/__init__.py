"""Images in conversations: their bytes, pixels and places."""
