"""The gRPC services of the controller: they check a call, hand it to a part, and answer."""
