"""Code that all other packages share: settings, facts of models and machines, and pure rules."""
