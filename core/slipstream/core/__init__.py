"""Settings, model records, machine facts and pure rules, which all other packages share."""
