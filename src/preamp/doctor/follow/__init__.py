"""A run as it trains: hooks turn what happens into events and records; nothing of the script is changed."""
