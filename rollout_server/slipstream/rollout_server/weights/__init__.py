"""New weights in the workers of the engine: transports, copy plans and the receiver."""
