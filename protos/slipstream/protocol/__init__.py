"""Types, rules, wire forms and settings that several parts share."""
