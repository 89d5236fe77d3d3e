"""The state that para_core keeps on one instance: a record with named slots, and a private class that walks them."""
