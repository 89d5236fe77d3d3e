"""Record a model call: its modules, attention calls, functions and operators, as events in order of time."""
