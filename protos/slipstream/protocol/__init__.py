"""What all parts agree on, nothing that only one needs: types, rules, wire forms, settings."""
