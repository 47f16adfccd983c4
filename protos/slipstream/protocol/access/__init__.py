"""Access: addresses that may be opened, tokens and TLS, and checks of callers."""
