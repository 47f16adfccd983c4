"""What all parts of Slipstream agree on, and nothing that only one of them needs: types, rules, wire forms, settings."""
