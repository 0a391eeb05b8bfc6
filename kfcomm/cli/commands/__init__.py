"""Commands: one module each, with a click command of the same name; found by listing this folder."""
