"""A page of what runs wrote into their folders, for a browser on this machine; read-only."""
