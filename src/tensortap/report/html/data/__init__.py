"""The data that the page's scripts draw from."""
