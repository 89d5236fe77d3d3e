"""A tiny Wan that was trained here: moving shapes from captions."""
