"""Controls access: which addresses may be opened, tokens, TLS, and checks of callers."""
