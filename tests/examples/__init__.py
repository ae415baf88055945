"""The examples, and with them every line of the documents that the product was asked for in."""
