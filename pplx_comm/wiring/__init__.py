"""From the arguments of an AllToAll to an exchange that is wired to every peer."""
