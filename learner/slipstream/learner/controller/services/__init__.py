"""The gRPC services of the controller: they check a call, pass it to its handler, and answer."""
