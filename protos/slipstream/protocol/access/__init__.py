"""Who may connect to what, and how those who connect are told apart."""
