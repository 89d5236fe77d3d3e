"""How one attention call is computed over a mesh."""
