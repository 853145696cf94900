"""Put the result into words and tables."""
