"""gradsight serve: a real server on 127.0.0.1, and a real browser on its page."""
