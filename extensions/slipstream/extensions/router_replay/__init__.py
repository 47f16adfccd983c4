"""The trainer's routers choose the experts that the engine chose."""
