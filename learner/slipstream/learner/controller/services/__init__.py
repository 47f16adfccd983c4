"""The services of the controller: they check a call, hand it to the part that knows, and answer."""
