"""The JSON Schema front end: what a schema says, what of it is enforced, what is refused."""
