"""gradsight serve: the page of a run while it is being written, on this machine only. No torch."""
