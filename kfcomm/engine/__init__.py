"""The engine of one rank: it carries out what the core decides, on memory and links."""
