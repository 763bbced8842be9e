"""The commands, one module each; imported only when their command runs."""
