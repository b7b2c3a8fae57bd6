"""The engines behind the grammar interface: one file each."""
